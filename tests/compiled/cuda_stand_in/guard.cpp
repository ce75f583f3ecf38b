// What torch asks of a CUDA device before any kernel runs, answered without one: with this library loaded before torch,
// a build of torch for CPUs runs autograd on fake tensors of CUDA devices.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceType;
using c10::Stream;

const Device first(DeviceType::CUDA, 0);

struct Guard : public c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return first; }
  Device getDevice() const override { return first; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, first); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, first); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, first); }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

struct Hooks : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  int getNumGPUs() const override { return 2; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 2; }
  c10::DeviceIndex current_device() const override { return 0; }
};

Guard guard;
c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, &guard);

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;

}  // namespace

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
