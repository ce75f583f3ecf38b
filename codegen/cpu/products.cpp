// Products of a matrix, transposed, with another one in float32 on CPUs: what gives a weight's gradient. Blocks are
// packed once and multiplied in registers (Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication,
// ACM TOMS 34(3), 2008). Neither has to be transposed: both have the rows over which is summed.
//
// The constants DEPTH, LEFT_COLUMNS and RIGHT_COLUMNS stand in front of this text: see zerofx/ir/op_kernels/products.py, which counts
// the scratch.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/cpu/vec/functional.h>
#include <torch/csrc/inductor/cpp_prefix.h>

#include <cstring>

namespace {

using Vec = at::vec::Vectorized<float>;

constexpr int64_t WIDTH = Vec::size();
constexpr int VECTORS = 2;
constexpr int64_t PANEL = VECTORS * WIDTH;
constexpr int ROWS = WIDTH == 16 ? 12 : 6;  // 24 or 12 sums, which 32 or 16 registers hold beside operands
static_assert(RIGHT_COLUMNS % PANEL == 0 && LEFT_COLUMNS % ROWS == 0, "blocks are whole panels");

// Copy `columns` columns of `rows` rows into panels of SIZE columns, the last one filled up with zeros.
template <int64_t SIZE>
void pack(const float* from, int64_t stride, int64_t rows, int64_t columns, float* into) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* source = from + row * stride;
    float* target = into + row * SIZE;
    int64_t column = 0;
    for (; column + SIZE <= columns; column += SIZE, target += rows * SIZE)
      std::memcpy(target, source + column, SIZE * sizeof(float));
    if (column < columns) {
      std::memset(target, 0, SIZE * sizeof(float));
      std::memcpy(target, source + column, (columns - column) * sizeof(float));
    }
  }
}

// into[ROWS, PANEL] = or += left^T right, of a panel each. What is summed, and in which order, is the same wherever an
// element lies.
void multiply(const float* left, const float* right, int64_t depth, float* into, int64_t stride, bool add) {
  Vec sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
      sums[r][v] = Vec(0.f);
      __builtin_prefetch(into + r * stride + v * WIDTH, 1);
    }
  for (int64_t k = 0; k < depth; ++k) {
    Vec loaded[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) loaded[v] = Vec::loadu(right + k * PANEL + v * WIDTH);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const Vec factor(left[k * ROWS + r]);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = at::vec::fmadd(factor, loaded[v], sums[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
      float* at = into + r * stride + v * WIDTH;
      (add ? sums[r][v] + Vec::loadu(at) : sums[r][v]).store(at);
    }
}

// The same at an edge, where there are only so many rows and columns.
void multiply_edge(const float* left, const float* right, int64_t depth, float* into, int64_t stride, bool add,
                   int64_t rows, int64_t columns) {
  float whole[ROWS * PANEL];
  multiply(left, right, depth, whole, PANEL, false);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      float& at = into[r * stride + c];
      at = add ? whole[r * PANEL + c] + at : whole[r * PANEL + c];
    }
}

}  // namespace

// result[n, k] = sum over m of left[m, n] right[m, k]; strides of rows in elements. `scratch` begins with the packed
// block of `right`; behind it each thread has a packed block of its part of `left`.
extern "C" void kernel(float* left, float* right, float* result, float* scratch, int64_t* sizes) {
  const int64_t depth = sizes[0], rows = sizes[1], columns = sizes[2];
  const int64_t left_stride = sizes[3], right_stride = sizes[4], stride = sizes[5];
  const int64_t deepest = std::min<int64_t>(DEPTH, depth);
#pragma omp parallel num_threads(static_cast<int>(sizes[6]))
  {
#ifdef _OPENMP
    const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
#else
    const int64_t thread = 0, num_threads = 1;
#endif
    float* packed = scratch + deepest * (RIGHT_COLUMNS + thread * LEFT_COLUMNS);
    const int64_t num_panels = (rows + ROWS - 1) / ROWS;
    const int64_t begin = num_panels * thread / num_threads * ROWS;
    const int64_t end = std::min(rows, num_panels * (thread + 1) / num_threads * ROWS);
    for (int64_t column = 0; column < columns; column += RIGHT_COLUMNS)
      for (int64_t first = 0; first < depth; first += DEPTH) {
        const int64_t deep = std::min<int64_t>(DEPTH, depth - first);
        const int64_t wide = std::min<int64_t>(RIGHT_COLUMNS, columns - column);
        const float* from = right + first * right_stride + column;
#pragma omp for schedule(static)
        for (int64_t c = 0; c < wide; c += PANEL)
          pack<PANEL>(from + c, right_stride, deep, std::min<int64_t>(PANEL, wide - c), scratch + c * deep);
        for (int64_t row = begin; row < end; row += LEFT_COLUMNS) {
          const int64_t high = std::min<int64_t>(LEFT_COLUMNS, end - row);
          pack<ROWS>(left + first * left_stride + row, left_stride, deep, high, packed);
          for (int64_t c = 0; c < wide; c += PANEL)
            for (int64_t r = 0; r < high; r += ROWS) {
              float* into = result + (row + r) * stride + column + c;
              const float *one = packed + r * deep, *other = scratch + c * deep;
              if (high - r >= ROWS && wide - c >= PANEL)
                multiply(one, other, deep, into, stride, first > 0);
              else
                multiply_edge(one, other, deep, into, stride, first > 0, std::min<int64_t>(ROWS, high - r),
                              std::min<int64_t>(PANEL, wide - c));
            }
        }
#pragma omp barrier
      }
  }
}
