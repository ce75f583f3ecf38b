// Attention in float32 and its gradients on CPUs, blocks of scores at a time: FlashAttention-2 (arXiv 2307.08691,
// algorithms 1 and 2). Products of a block run in the registers of one core, on operands packed for it.
//
// The constants QUERIES, KEYS and SPAN stand in front of this text: see zerofx/ir/op_kernels/attention.py, which counts the scratch.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/cpu/vec/functional.h>
#include <torch/csrc/inductor/cpp_prefix.h>

namespace {

using Vec = at::vec::Vectorized<float>;

constexpr int64_t WIDTH = Vec::size();
constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = WIDTH == 16 ? 4 : 2;  // 24 or 12 sums, which 32 or 16 registers hold beside operands
constexpr int64_t PANEL = TILE_VECTORS * WIDTH;
static_assert(KEYS % PANEL == 0, "scores are made in whole panels");

// Rows of one tensor [samples, heads, tokens, dim]; strides in elements, that of dim is 1.
struct Rows {
  float* data;
  int64_t sample, head, token;
  float* of(int64_t at_sample, int64_t at_head) const { return data + at_sample * sample + at_head * head; }
};

constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// What is added to the scores: a row of num_keys for each sample, head and query, or, where there is but one, for all of
// them; strides in elements. The ends are found once for all heads that share a row: how many keys of each block of
// KEYS there are up to the last one that is not hidden.
struct Mask {
  const float* data;
  int64_t samples, heads, queries, sample, head, query, key;
  int32_t* ends;
  int64_t num_blocks;

  int64_t row(int64_t at_sample, int64_t at_head, int64_t at_query) const {
    const int64_t one_of_all = samples == 1 ? 0 : at_sample, one_of_sample = heads == 1 ? 0 : at_head;
    return (one_of_all * heads + one_of_sample) * queries + (queries == 1 ? 0 : at_query);
  }
  const float* of_row(int64_t row) const {
    return data + row / queries / heads * sample + row / queries % heads * head + row % queries * query;
  }
  int64_t end(int64_t row, int64_t first_key) const { return ends[row * num_blocks + first_key / KEYS]; }
  // num elements of a row beside each other: where they lie, or in copied.
  const float* beside(int64_t row, int64_t first_key, int64_t num, float* copied) const {
    const float* from = of_row(row) + first_key * key;
    if (key == 1) return from;
    for (int64_t k = 0; k < num; ++k) copied[k] = from[k * key];
    return copied;
  }
};

struct Problem {
  int64_t samples, heads, num_queries, num_keys, dim;
  bool is_causal;
  float scale;
  Mask mask;

  bool is_masked() const { return mask.data != nullptr; }
  // How many of num_here keys from first_key, where a block begins, there are up to the last one that the query sees:
  // none is after its own place if causal.
  int64_t num_seen(int64_t at_sample, int64_t at_head, int64_t query, int64_t first_key, int64_t num_here) const {
    const int64_t seen = is_causal ? std::clamp<int64_t>(query + 1 - first_key, 0, num_here) : num_here;
    return is_masked() ? std::min(seen, mask.end(mask.row(at_sample, at_head, query), first_key)) : seen;
  }
  // The most that one of the queries from first to last sees.
  int64_t most_seen(int64_t at_sample, int64_t at_head, int64_t first, int64_t last, int64_t first_key,
                    int64_t num_here) const {
    int64_t most = num_seen(at_sample, at_head, last, first_key, num_here);
    for (int64_t query = first; is_masked() && query < last && most < num_here; ++query)
      most = std::max(most, num_seen(at_sample, at_head, query, first_key, num_here));
    return most;
  }
};

// One matrix: element (row, column) is at data[row * row_stride + column * column_stride].
struct Left {
  const float* data;
  int64_t row_stride, column_stride;
};

// One matrix in panels of PANEL columns.
struct Right {
  const float* data;
  int64_t row_stride, panel_stride;
};

// into[R, V vectors] = or += left[R, depth] right[depth, V vectors]; with a tail, only that many columns of one vector.
template <int R, int V>
inline void tile(Left left, const float* right, int64_t row_stride, float* into, int64_t into_stride, int64_t depth,
                 int64_t tail, bool add) {
  Vec sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const float* from = into + r * into_stride + v * WIDTH;
      sums[r][v] = !add ? Vec(0.f) : tail ? Vec::loadu(from, tail) : Vec::loadu(from);
    }
  for (int64_t k = 0; k < depth; ++k) {
    Vec loaded[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const float* from = right + k * row_stride + v * WIDTH;
      loaded[v] = tail ? Vec::loadu(from, tail) : Vec::loadu(from);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec one(left.data[r * left.row_stride + k * left.column_stride]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = at::vec::fmadd(one, loaded[v], sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* to = into + r * into_stride + v * WIDTH;
      if (tail)
        sums[r][v].store(to, tail);
      else
        sums[r][v].store(to);
    }
}

template <int V>
inline void columns(Left left, const float* right, int64_t row_stride, float* into, int64_t into_stride,
                    int64_t num_rows, int64_t depth, int64_t tail, bool add) {
  for (int64_t row = 0; row < num_rows; row += TILE_ROWS) {
    const Left from{left.data + row * left.row_stride, left.row_stride, left.column_stride};
    float* to = into + row * into_stride;
    switch (num_rows - row) {
      case 1: tile<1, V>(from, right, row_stride, to, into_stride, depth, tail, add); break;
      case 2: tile<2, V>(from, right, row_stride, to, into_stride, depth, tail, add); break;
      case 3: tile<3, V>(from, right, row_stride, to, into_stride, depth, tail, add); break;
      case 4: tile<4, V>(from, right, row_stride, to, into_stride, depth, tail, add); break;
      case 5: tile<5, V>(from, right, row_stride, to, into_stride, depth, tail, add); break;
      default: tile<TILE_ROWS, V>(from, right, row_stride, to, into_stride, depth, tail, add);
    }
  }
}

// into[num_rows, num_columns] = or += left[num_rows, depth] right[depth, num_columns]
inline void product(Left left, Right right, float* into, int64_t into_stride, int64_t num_rows, int64_t num_columns,
                    int64_t depth, bool add) {
  int64_t done = 0;
  for (; done + PANEL <= num_columns; done += PANEL, right.data += right.panel_stride)
    columns<TILE_VECTORS>(left, right.data, right.row_stride, into + done, into_stride, num_rows, depth, 0, add);
  for (; done + WIDTH <= num_columns; done += WIDTH, right.data += WIDTH)
    columns<1>(left, right.data, right.row_stride, into + done, into_stride, num_rows, depth, 0, add);
  if (done < num_columns)
    columns<1>(left, right.data, right.row_stride, into + done, into_stride, num_rows, depth, num_columns - done, add);
}

inline int64_t in_panels(int64_t num_columns) { return (num_columns + PANEL - 1) / PANEL * PANEL; }

// A head's rows, each of which begins in another page, so that the processor does not foresee them: they are asked for one
// by one while others are computed.
struct Ahead {
  int64_t sample, head, next_sample, next_head, dim;

  template <bool WRITTEN = false>
  void prefetch(const float* row) const {
    constexpr int64_t LINE = 64 / sizeof(float);
    for (int64_t d = 0; d < dim; d += LINE) __builtin_prefetch(row + d, WRITTEN, 2);
  }
  // The row of this head if it comes before end, or else the next head's if that has it.
  void read(Rows rows, int64_t row, int64_t end, int64_t next_row, int64_t next_end) const {
    if (row < end)
      prefetch(rows.of(sample, head) + row * rows.token);
    else if (next_row < next_end)
      prefetch(rows.of(next_sample, next_head) + next_row * rows.token);
  }
  void write(Rows rows, int64_t row, int64_t end) const {
    if (row < end) prefetch<true>(rows.of(sample, head) + row * rows.token);
  }
};

inline void copy_rows(const float* from, int64_t from_stride, float* into, int64_t into_stride, int64_t num_rows,
                      int64_t dim) {
  for (int64_t row = 0; row < num_rows; ++row) std::copy_n(from + row * from_stride, dim, into + row * into_stride);
}

// [num_rows, dim] transposed into panels of [dim, PANEL], the last filled up with zeros.
inline void pack_transposed(const float* from, int64_t from_stride, float* into, int64_t num_rows, int64_t dim) {
  for (int64_t first = 0; first < num_rows; first += PANEL) {
    const int64_t have = std::min(PANEL, num_rows - first);
    const float* rows = from + first * from_stride;
    float* panel = into + first * dim;
    int64_t d = 0;
    for (; have == PANEL && d + WIDTH <= dim; d += WIDTH)
      for (int64_t row = 0; row < PANEL; row += WIDTH)
        at::vec::transpose_mxn<float>(rows + row * from_stride + d, from_stride, panel + d * PANEL + row, PANEL,
                                      WIDTH, WIDTH);
    for (; d < dim; ++d)
      for (int64_t row = 0; row < PANEL; ++row)
        panel[d * PANEL + row] = row < have ? rows[row * from_stride + d] : 0.f;
  }
}

inline float largest(const float* values, int64_t num) {
  return at::vec::reduce_all<float>([](Vec one, Vec other) { return at::vec::maximum(one, other); }, values, num);
}

inline float sum(const float* values, int64_t num) {
  return at::vec::reduce_all<float>([](Vec one, Vec other) { return one + other; }, values, num);
}

inline float dot(const float* one, const float* other, int64_t num) {
  return at::vec::map2_reduce_all<float>([](Vec x, Vec y) { return x * y; }, [](Vec x, Vec y) { return x + y; }, one,
                                         other, num);
}

// Scores to score * scale + mask.
inline void add_mask(float* scores, const float* mask, int64_t num, float scale) {
  at::vec::map2<float>([=](Vec x, Vec y) { return at::vec::fmadd(x, Vec(scale), y); }, scores, scores, mask, num);
}

// Scores to exp(score * scale - top).
inline void exponentials(float* scores, int64_t num, float scale, float top) {
  at::vec::map<float>([=](Vec x) { return at::vec::fmsub(x, Vec(scale), Vec(top)).exp_u20(); }, scores, scores, num);
}

// How many values there are up to the last one that is not HIDDEN.
inline int64_t shown(const float* values, int64_t num) {
  for (int64_t tail = num % WIDTH; tail > 0; --tail)
    if (values[num - num % WIDTH + tail - 1] != HIDDEN) return num - num % WIDTH + tail;
  for (int64_t first = num - num % WIDTH - WIDTH; first >= 0; first -= WIDTH)
    if ((Vec::loadu(values + first) == Vec(HIDDEN)).zero_mask() != 0) {
      int64_t last = WIDTH;
      while (values[first + last - 1] == HIDDEN) --last;
      return first + last;
    }
  return 0;
}

void find_ends(const Mask& mask, int64_t num_keys, float* scratch) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < mask.samples * mask.heads * mask.queries; ++row)
    for (int64_t block = 0; block < mask.num_blocks; ++block) {
      const int64_t num = std::min(KEYS, num_keys - block * KEYS);
      mask.ends[row * mask.num_blocks + block] =
          static_cast<int32_t>(shown(mask.beside(row, block * KEYS, num, scratch), num));
    }
}

// SPAN queries of a head at a time: each block of keys is packed once for all of them. A row's largest score and sum
// are kept as blocks of keys go by, and its result is scaled anew where a larger score turns up.
void forward(const Problem& problem, Rows queries, Rows keys, Rows values, Rows result, Rows log_sums, float* scratch) {
  const auto [samples, heads, num_queries, num_keys, dim, is_causal, scale, mask] = problem;
  const int64_t spans = (num_queries + SPAN - 1) / SPAN;
#pragma omp for schedule(static)
  for (int64_t task = 0; task < samples * heads * spans; ++task) {
    const int64_t sample = task / spans / heads, head = task / spans % heads;
    const int64_t begin = task % spans * SPAN, end = std::min(begin + SPAN, num_queries);
    const int64_t next = std::min(task + 1, samples * heads * spans - 1);
    const Ahead ahead{sample, head, next / spans / heads, next / spans % heads, dim};
    float* packed_keys = scratch;
    float* packed_values = packed_keys + KEYS * dim;
    float* scores = packed_values + KEYS * dim;
    float* sums = scores + QUERIES * KEYS;
    float* tops = sums + SPAN * dim;
    float* totals = tops + SPAN;
    float* row_mask = totals + SPAN;
    bool has_begun[(SPAN + QUERIES - 1) / QUERIES] = {};  // by block of queries: whether there are sums to add to
    std::fill_n(tops, end - begin, HIDDEN);
    std::fill_n(totals, end - begin, 0.f);
    for (int64_t first_key = 0; first_key < num_keys; first_key += KEYS) {
      const int64_t block =
          problem.most_seen(sample, head, begin, end - 1, first_key, std::min(KEYS, num_keys - first_key));
      if (block == 0) continue;
      pack_transposed(keys.of(sample, head) + first_key * keys.token, keys.token, packed_keys, block, dim);
      copy_rows(values.of(sample, head) + first_key * values.token, values.token, packed_values, dim, block, dim);
      for (int64_t first = begin; first < end; first += QUERIES) {
        const int64_t rows = std::min(QUERIES, end - first);
        const int64_t here = problem.most_seen(sample, head, first, first + rows - 1, first_key, block);
        if (here == 0) continue;
        float* result_sums = sums + (first - begin) * dim;
        bool& begun = has_begun[(first - begin) / QUERIES];
        product({queries.of(sample, head) + first * queries.token, queries.token, 1}, {packed_keys, PANEL, PANEL * dim},
                scores, KEYS, rows, in_panels(here), dim, false);
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t place = first - begin + row;
          ahead.read(queries, first + QUERIES + row, end, next % spans * SPAN + row, num_queries);
          for (const Rows& one : {keys, values})
            ahead.read(one, first_key + KEYS + place, std::min(first_key + 2 * KEYS, num_keys), place, std::min(KEYS, num_keys));
          if (first_key == 0) ahead.write(result, first + row, end);
          float* row_scores = scores + row * KEYS;
          float &top = tops[place], &total = totals[place];
          int64_t seen = problem.num_seen(sample, head, first + row, first_key, here);
          float block_top = HIDDEN;
          if (seen > 0 && problem.is_masked()) {
            add_mask(row_scores, mask.beside(mask.row(sample, head, first + row), first_key, seen, row_mask), seen, scale);
            block_top = largest(row_scores, seen);
            if (block_top == HIDDEN) seen = 0;  // scores so low that with what is added they are beyond all numbers
          } else if (seen > 0) {
            block_top = largest(row_scores, seen) * scale;
          }
          std::fill(row_scores + seen, row_scores + here, 0.f);
          if (seen == 0) continue;
          const float new_top = std::max(top, block_top);
          exponentials(row_scores, seen, problem.is_masked() ? 1.f : scale, new_top);
          const float block_total = sum(row_scores, seen);
          if (top == HIDDEN) {
            total = block_total;
          } else {
            const float shrink = std::exp(top - new_top);
            total = total * shrink + block_total;
            float* row_sums = result_sums + row * dim;
            at::vec::map<float>([=](Vec x) { return x * Vec(shrink); }, row_sums, row_sums, dim);
          }
          top = new_top;
        }
        product({scores, KEYS, 1}, {packed_values, dim, PANEL}, result_sums, dim, rows, dim, here, begun);
        begun = true;
      }
    }
    for (int64_t query = begin; query < end; ++query) {
      const int64_t row = query - begin;
      float* to = result.of(sample, head) + query * result.token;
      float& log_sum = log_sums.of(sample, head)[query * log_sums.token];
      if (totals[row] == 0.f) {  // the query sees nothing: as ATen has it, the result is zero, and so is the logarithm
        std::fill_n(to, dim, 0.f);
        log_sum = 0.f;
        continue;
      }
      const Vec factor(1.f / totals[row]);
      at::vec::map<float>([=](Vec x) { return x * factor; }, to, sums + row * dim, dim);
      log_sum = tops[row] + std::log(totals[row]);
    }
  }
}

// A block of a head's keys at a time: probabilities of the queries that see them are made again, a block of queries at a
// time, and with them the gradients of keys and values, while that of the queries is summed up over blocks of keys.
void backward(const Problem& problem, Rows queries, Rows keys, Rows values, Rows result, Rows log_sums, Rows grads,
              Rows query_grads, Rows key_grads, Rows value_grads, float* scratch) {
  const auto [samples, heads, num_queries, num_keys, dim, is_causal, scale, mask] = problem;
#pragma omp for schedule(static)
  for (int64_t task = 0; task < samples * heads; ++task) {
    const int64_t sample = task / heads, head = task % heads, next = std::min(task + 1, samples * heads - 1);
    const Ahead ahead{sample, head, next / heads, next % heads, dim};
    float* transposed_keys = scratch;
    float* transposed_values = transposed_keys + KEYS * dim;
    float* packed_keys = transposed_values + KEYS * dim;
    float* key_sums = packed_keys + KEYS * dim;
    float* value_sums = key_sums + KEYS * dim;
    float* probabilities = value_sums + KEYS * dim;
    float* score_grads = probabilities + QUERIES * KEYS;
    float* packed_queries = score_grads + QUERIES * KEYS;
    float* packed_grads = packed_queries + QUERIES * dim;
    float* row_mask = packed_grads + QUERIES * dim;
    for (int64_t first_key = 0; first_key < num_keys; first_key += KEYS) {
      const int64_t block = std::min(KEYS, num_keys - first_key);
      const float* block_keys = keys.of(sample, head) + first_key * keys.token;
      pack_transposed(block_keys, keys.token, transposed_keys, block, dim);
      pack_transposed(values.of(sample, head) + first_key * values.token, values.token, transposed_values, block, dim);
      copy_rows(block_keys, keys.token, packed_keys, dim, block, dim);
      std::fill_n(key_sums, block * dim, 0.f);
      std::fill_n(value_sums, block * dim, 0.f);
      for (int64_t first = 0; first < num_queries; first += QUERIES) {
        const int64_t rows = std::min(QUERIES, num_queries - first);
        const int64_t here = problem.most_seen(sample, head, first, first + rows - 1, first_key, block);
        float* row_query_grads = query_grads.of(sample, head) + first * query_grads.token;
        if (here == 0) {
          for (int64_t row = 0; first_key == 0 && row < rows; ++row)
            std::fill_n(row_query_grads + row * query_grads.token, dim, 0.f);
          continue;
        }
        copy_rows(queries.of(sample, head) + first * queries.token, queries.token, packed_queries, dim, rows, dim);
        copy_rows(grads.of(sample, head) + first * grads.token, grads.token, packed_grads, dim, rows, dim);
        product({packed_queries, dim, 1}, {transposed_keys, PANEL, PANEL * dim}, probabilities, KEYS, rows,
                in_panels(here), dim, false);
        product({packed_grads, dim, 1}, {transposed_values, PANEL, PANEL * dim}, score_grads, KEYS, rows,
                in_panels(here), dim, false);
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t query = first + row, seen = problem.num_seen(sample, head, query, first_key, here);
          for (const Rows& one : {queries, grads, result}) ahead.read(one, query + QUERIES, num_queries, row, num_queries);
          for (const Rows& one : {keys, values})
            ahead.read(one, first_key + KEYS + query, std::min(first_key + 2 * KEYS, num_keys), query, std::min(KEYS, num_keys));
          for (const Rows& one : {key_grads, value_grads}) ahead.write(one, first_key + query, first_key + block);
          ahead.write(query_grads, query, num_queries);
          float *row_probabilities = probabilities + row * KEYS, *row_grads = score_grads + row * KEYS;
          const Vec factor(scale), delta(dot(result.of(sample, head) + query * result.token, packed_grads + row * dim, dim));
          if (problem.is_masked())
            add_mask(row_probabilities, mask.beside(mask.row(sample, head, query), first_key, seen, row_mask), seen, scale);
          exponentials(row_probabilities, seen, problem.is_masked() ? 1.f : scale,
                       log_sums.of(sample, head)[query * log_sums.token]);
          at::vec::map2<float>([=](Vec grad, Vec probability) { return (grad - delta) * probability * factor; },
                               row_grads, row_grads, row_probabilities, seen);
          std::fill(row_probabilities + seen, row_probabilities + here, 0.f);
          std::fill(row_grads + seen, row_grads + here, 0.f);
        }
        product({probabilities, 1, KEYS}, {packed_grads, dim, PANEL}, value_sums, dim, here, dim, rows, true);
        product({score_grads, 1, KEYS}, {packed_queries, dim, PANEL}, key_sums, dim, here, dim, rows, true);
        product({score_grads, KEYS, 1}, {packed_keys, dim, PANEL},
                row_query_grads, query_grads.token, rows, dim, here, first_key != 0);
      }
      copy_rows(key_sums, dim, key_grads.of(sample, head) + first_key * key_grads.token, key_grads.token, block, dim);
      copy_rows(value_sums, dim, value_grads.of(sample, head) + first_key * value_grads.token, value_grads.token,
                block, dim);
    }
  }
}

}  // namespace

// Sizes: samples, heads, queries, keys, dim, whether causal, threads, scratch elements of a thread; of the mask, how many
// samples, heads and queries have rows of their own, and its strides; then the strides of sample, head and token, tensor
// by tensor. The forward is run where there are no gradients. Other threads may run Python
// meanwhile, as with ATen's operators: what reads messages or moves data between tiers does.
extern "C" void kernel(float* queries, float* keys, float* values, float* result, float* log_sums, float* grads,
                       float* query_grads, float* key_grads, float* value_grads, const float* mask, int32_t* ends, float* scratch,
                       const int64_t* sizes, float scale) {
  const int64_t num_keys = sizes[3];
  const Mask added{mask,      sizes[8],  sizes[9],  sizes[10], sizes[11],
                   sizes[12], sizes[13], sizes[14], ends,      (num_keys + KEYS - 1) / KEYS};
  const Problem problem{sizes[0], sizes[1], sizes[2], num_keys, sizes[4], sizes[5] != 0, scale, added};
  const int64_t num_threads = sizes[6], scratch_numel = sizes[7];
  const auto rows = [&](float* data, int64_t number) {
    const int64_t* strides = sizes + 15 + 3 * number;
    return Rows{data, strides[0], strides[1], strides[2]};
  };
  PyThreadState* const thread = PyEval_SaveThread();
#pragma omp parallel num_threads(num_threads)
  {
    float* own = scratch + omp_get_thread_num() * scratch_numel;
    if (problem.is_masked()) find_ends(added, num_keys, own);
    if (grads == nullptr)
      forward(problem, rows(queries, 0), rows(keys, 1), rows(values, 2), rows(result, 3), rows(log_sums, 4), own);
    else
      backward(problem, rows(queries, 0), rows(keys, 1), rows(values, 2), rows(result, 3), rows(log_sums, 4),
               rows(grads, 5), rows(query_grads, 6), rows(key_grads, 7), rows(value_grads, 8), own);
  }
  PyEval_RestoreThread(thread);
}
