// What a small language model needs to train: norms, rotary positions, attention, cross entropy,
// embeddings, and a choice of experts. The same rules as in operators.cpp.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "operators.h"

using namespace sim;

UNARY(Silu, x / (1 + std::exp(-x)))
UNARY(Cos, std::cos(x))
UNARY(Sin, std::sin(x))
UNARY(Rsqrt, 1 / std::sqrt(x))
UNARY(Sign, (x > 0) - (x < 0))

OPERATOR(aclnnPowScalarTensor, (Number base, In exponent, Out out), {
  return pointwise(out, [](auto b, auto x) { return std::pow(double(b), double(x)); }, base, exponent);
})
OPERATOR(aclnnSiluBackward, (In grad, In self, Out out), {
  return pointwise(out, [](auto g, auto x) {
    const auto s = 1 / (1 + std::exp(-x));
    return g * s * (1 + x * (1 - s));
  }, grad, self);
})
OPERATOR(aclnnInplaceMaskedFillScalar, (Out self, In mask, Number value), {
  return pointwise(self, [](auto x, auto m, auto v) { return m != 0 ? v : x; }, self, mask, value);
})
// Either limit may be null.
OPERATOR(aclnnClamp, (In self, Number least, Number most, Out out), {
  const double infinity = std::numeric_limits<double>::infinity();
  const double low = least ? operand(least).real : -infinity;
  const double high = most ? operand(most).real : infinity;
  return pointwise(out, [=](auto x) { return std::min(std::max(double(x), low), high); }, self);
})
OPERATOR(aclnnTriu, (In self, int64_t diagonal, Out out), {
  const Tensor from = operand(self), to = operand(out);
  Ints column_less_row(to.sizes.size(), 0);
  column_less_row.rbegin()[0] = 1;
  column_less_row.rbegin()[1] = -1;
  const std::array<Ints, 3> strides{to.strides, broadcast(from, to.sizes), column_less_row};
  return [=] {
    walk(to.sizes, strides, [&](const auto& at) {
      store(to.dtype, to.at(at[0]), at[2] < diagonal ? 0.0 : read<double>(from, at[1]));
    });
    return int{kSuccess};
  };
})

// ---- along one dimension: rows are read into doubles, worked on, and written back

namespace {

using Row = std::vector<double>;

// `in` and `out` without `dim`; make(row of each input, row of the output).
template <class Make, size_t N>
Task by_rows(Tensor out, const std::array<Tensor, N>& ins, int64_t dim, Make make) {
  const int64_t axis = wrap(dim, out.rank()), length = out.sizes[axis];
  std::array<Ints, N + 1> strides{out.strides};
  for (size_t n = 0; n < N; ++n) {
    if (ins[n].sizes != out.sizes) refuse("shapes differ");
    strides[n + 1] = ins[n].strides;
  }
  return [=] {
    std::array<Row, N> rows;
    rows.fill(Row(length));
    Row result(length);
    walk(narrow(out, axis, 0, 1).sizes, strides, [&](const auto& at) {
      for (size_t n = 0; n < N; ++n)
        for (int64_t i = 0; i < length; ++i)
          rows[n][i] = read<double>(ins[n], at[n + 1] + i * ins[n].strides[axis]);
      make(rows, result);
      for (int64_t i = 0; i < length; ++i)
        store(out.dtype, out.at(at[0] + i * out.strides[axis]), result[i]);
    });
    return int{kSuccess};
  };
}

double log_of_sum(const Row& row) {
  const double top = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (double x : row) sum += std::exp(x - top);
  return top + std::log(sum);
}

}  // namespace

#define BY_ROWS(Name, ...) \
  OPERATOR(aclnn##Name, (In self, int64_t dim, Out out), { \
    return by_rows(operand(out), std::array{operand(self)}, dim, __VA_ARGS__); \
  })
#define BY_ROWS_BACKWARD(Name, ...) \
  OPERATOR(aclnn##Name, (In grad, In output, int64_t dim, Out out), { \
    return by_rows(operand(out), std::array{operand(grad), operand(output)}, dim, __VA_ARGS__); \
  })
BY_ROWS(Softmax, [](const auto& rows, Row& result) {
  const double whole = log_of_sum(rows[0]);
  for (size_t i = 0; i < result.size(); ++i) result[i] = std::exp(rows[0][i] - whole);
})
BY_ROWS(LogSoftmax, [](const auto& rows, Row& result) {
  const double whole = log_of_sum(rows[0]);
  for (size_t i = 0; i < result.size(); ++i) result[i] = rows[0][i] - whole;
})
BY_ROWS_BACKWARD(SoftmaxBackward, [](const auto& rows, Row& result) {
  const double dot = std::inner_product(rows[0].begin(), rows[0].end(), rows[1].begin(), 0.0);
  for (size_t i = 0; i < result.size(); ++i) result[i] = rows[1][i] * (rows[0][i] - dot);
})
BY_ROWS_BACKWARD(LogSoftmaxBackward, [](const auto& rows, Row& result) {
  const double sum = std::accumulate(rows[0].begin(), rows[0].end(), 0.0);
  for (size_t i = 0; i < result.size(); ++i) result[i] = rows[0][i] - std::exp(rows[1][i]) * sum;
})

// Each element of `dim` becomes `repeats` neighbours.
OPERATOR(aclnnRepeatInterleaveIntWithDim, (In self, int64_t repeats, int64_t dim, int64_t, Out out), {
  const Tensor from = operand(self);
  Tensor to = operand(out);
  const int64_t axis = wrap(dim, from.rank());
  if (to.sizes[axis] != from.sizes[axis] * repeats) refuse("the output does not fit");
  // The output with that dimension cut in two, the input the same for all of the second.
  const int64_t step = to.strides[axis];
  to = repeated(to, axis + 1, repeats);
  to.strides[axis + 1] = step;
  to.sizes[axis] = from.sizes[axis];
  to.strides[axis] = step * repeats;
  return copy(to, repeated(from, axis + 1, repeats));
})

// The best `k` of each row, the first of equals first.
OPERATOR(aclnnTopk, (In self, int64_t k, int64_t dim, bool largest, bool, Out values, Out indices), {
  const Tensor from = operand(self), best = operand(values), where = operand(indices);
  const int64_t axis = wrap(dim, from.rank()), length = from.sizes[axis];
  if (best.sizes != where.sizes || best.sizes[axis] != k || k > length) refuse("shapes differ");
  return [=] {
    Row row(length);
    Ints order(length);
    walk(narrow(from, axis, 0, 1).sizes, std::array<Ints, 3>{from.strides, best.strides, where.strides},
         [&](const auto& at) {
      for (int64_t i = 0; i < length; ++i)
        row[i] = read<double>(from, at[0] + i * from.strides[axis]) * (largest ? 1 : -1);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
      for (int64_t i = 0; i < k; ++i) {
        store(best.dtype, best.at(at[1] + i * best.strides[axis]), row[order[i]] * (largest ? 1 : -1));
        store(where.dtype, where.at(at[2] + i * where.strides[axis]), order[i]);
      }
    });
    return int{kSuccess};
  };
})

// ---- by index: one walk for all of them

namespace {

int nothing() { return kSuccess; }

// Elements of `table` that indices choose: walked with `sizes`, `strides` step through the table
// where no index does, and each index counts in steps of its own dimension. Out of range is an
// error of the task, as on the device.
struct Chosen {
  Tensor table;
  Ints sizes, strides;
  struct Index {
    Tensor numbers;
    int64_t step, limit;
  };
  std::vector<Index> indices;

  // visit(offset in the table, offset in `other`), in row-major order.
  template <class Visit>
  int each(const Tensor& other, Visit visit) const {
    Ints places(count_of(sizes), 0), row_major(sizes.size(), 1);
    for (size_t d = sizes.size(); d-- > 1;) row_major[d - 1] = row_major[d] * sizes[d];
    int64_t wrong = 0, limit = 0;
    for (const Index& index : indices)
      walk(sizes, std::array<Ints, 2>{row_major, broadcast(index.numbers, sizes)},
           [&](const auto& at) {
        int64_t number = read<int64_t>(index.numbers, at[1]);
        if (number < 0) number += index.limit;
        if (number < 0 || number >= index.limit) {
          wrong = number;
          limit = index.limit;
        }
        places[at[0]] += number * index.step;
      });
    if (limit)
      return fail(kAclnnParam, "index %lld of %lld", static_cast<long long>(wrong),
                  static_cast<long long>(limit));
    walk(sizes, std::array<Ints, 3>{row_major, strides, broadcast(other, sizes)},
         [&](const auto& at) { visit(at[1] + places[at[0]], at[2]); });
    return kSuccess;
  }
  Task read_into(Tensor out) const {
    if (out.count() == 0) return nothing;
    return [=, chosen = *this] {
      return chosen.each(out, [&](int64_t from, int64_t to) {
        std::memcpy(out.at(to), chosen.table.at(from), out.step());
      });
    };
  }
  // What is chosen several times adds up.
  Task add(Tensor values, double alpha) const {
    if (values.count() == 0) return nothing;
    return [=, chosen = *this] {
      const Tensor& t = chosen.table;
      return chosen.each(values, [&](int64_t to, int64_t from) {
        store(t.dtype, t.at(to), read<double>(t, to) + alpha * read<double>(values, from));
      });
    };
  }
};

// table[indices]: neighbouring dimensions from `first` on have an index each. The indices' common
// shape stands in their place.
Chosen by_indices(Tensor table, int64_t first, std::vector<Tensor> numbers) {
  Ints shape;
  for (const Tensor& n : numbers)
    if (n.rank() > static_cast<int64_t>(shape.size())) shape.resize(n.rank(), 1);
  for (const Tensor& n : numbers)
    for (int64_t d = 1; d <= n.rank(); ++d)
      shape[shape.size() - d] = std::max(shape[shape.size() - d], n.sizes[n.rank() - d]);
  const int64_t last = first + static_cast<int64_t>(numbers.size());
  const auto part = [](const Ints& all, int64_t from, int64_t to) {
    return Ints(all.begin() + from, all.begin() + to);
  };
  Chosen chosen{table, part(table.sizes, 0, first), part(table.strides, 0, first), {}};
  chosen.sizes.insert(chosen.sizes.end(), shape.begin(), shape.end());
  chosen.strides.resize(chosen.sizes.size(), 0);
  for (int64_t d = last; d < table.rank(); ++d) {
    chosen.sizes.push_back(table.sizes[d]);
    chosen.strides.push_back(table.strides[d]);
  }
  for (size_t i = 0; i < numbers.size(); ++i) {
    Tensor n = numbers[i];
    for (int64_t d = last; d < table.rank(); ++d) n = repeated(n, n.rank(), table.sizes[d]);
    chosen.indices.push_back({n, table.strides[first + i], table.sizes[first + i]});
  }
  return chosen;
}

// A dimension without an index has an empty one; where all are empty, nothing is chosen.
Chosen by_indices(Tensor table, const std::vector<Tensor>& given) {
  const auto real = [](const Tensor& t) { return t.count() > 0; };
  const auto first = std::find_if(given.begin(), given.end(), real);
  const auto last = std::find_if_not(first, given.end(), real);
  if (std::any_of(last, given.end(), real)) refuse("indices of dimensions that are not neighbours");
  if (first == given.end()) return {};
  return by_indices(table, first - given.begin(), {first, last});
}

// One number for each element of `numbers`, which has as many dimensions as the table (gather).
Chosen by_element(Tensor table, int64_t dim, Tensor numbers) {
  const int64_t axis = wrap(dim, table.rank());
  Chosen chosen{table, numbers.sizes, table.strides, {}};
  chosen.indices.push_back({numbers, table.strides[axis], table.sizes[axis]});
  chosen.strides[axis] = 0;
  return chosen;
}

}  // namespace

OPERATOR(aclnnEmbedding, (In weight, In indices, Out out),
         { return by_indices(operand(weight), 0, {operand(indices)}).read_into(operand(out)); })
OPERATOR(aclnnEmbeddingDenseBackward,
         (In grad, In indices, uint64_t, uint64_t padding, bool scale, Out out), {
  if (scale || padding < uint64_t{1} << 62) refuse("padding and scaling are not simulated");
  const Tensor to = operand(out);
  return in_turn({fill(to, {0, 0}), by_indices(to, 0, {operand(indices)}).add(operand(grad), 1)});
})
OPERATOR(aclnnIndex, (In self, List indices, Out out),
         { return by_indices(operand(self), operand(indices)).read_into(operand(out)); })
OPERATOR(aclnnIndexPutImpl, (Out self, List indices, In values, bool accumulate, bool), {
  if (!accumulate) refuse("only accumulation is simulated");
  return by_indices(operand(self), operand(indices)).add(operand(values), 1);
})
OPERATOR(aclnnIndexSelect, (In self, int64_t dim, In index, Out out), {
  const Tensor from = operand(self);
  return by_indices(from, wrap(dim, from.rank()), {operand(index)}).read_into(operand(out));
})
OPERATOR(aclnnIndexAdd, (In self, int64_t dim, In index, In source, Number alpha, Out out), {
  const Tensor to = operand(out);
  return in_turn({copy(to, operand(self)), by_indices(to, wrap(dim, to.rank()), {operand(index)})
                                               .add(operand(source), operand(alpha).real)});
})
OPERATOR(aclnnGather, (In self, int64_t dim, In index, Out out),
         { return by_element(operand(self), dim, operand(index)).read_into(operand(out)); })
OPERATOR(aclnnScatterAdd, (In self, int64_t dim, In index, In source, Out out), {
  const Tensor to = operand(out);
  return in_turn({copy(to, operand(self)), by_element(to, dim, operand(index)).add(operand(source), 1)});
})
OPERATOR(aclnnBincount, (In self, In weights, int64_t, Out out), {
  if (weights) refuse("weights are not simulated");
  const Tensor to = operand(out);
  return in_turn({fill(to, {0, 0}), [=, chosen = by_indices(to, 0, {operand(self)})] {
    return chosen.each(chosen.indices[0].numbers, [&](int64_t at, int64_t) {
      store(to.dtype, to.at(at), read<int64_t>(to, at) + 1);
    });
  }});
})
// The places of what is not zero, a row for each; how many there are shows only when it has run.
OPERATOR(aclnnNonzero, (In self, Out out), {
  const Tensor from = operand(self), to = operand(out);
  Ints row_major(from.sizes.size(), 1);
  for (size_t d = from.sizes.size(); d-- > 1;) row_major[d - 1] = row_major[d] * from.sizes[d];
  return [=] {
    int64_t found = 0;
    walk(from.sizes, std::array<Ints, 2>{from.strides, row_major}, [&](const auto& at) {
      if (read<double>(from, at[0]) == 0) return;
      for (int64_t d = 0; d < from.rank(); ++d)
        store(to.dtype, to.at(found * to.strides[0] + d * to.strides[1]),
              at[1] / row_major[d] % from.sizes[d]);
      ++found;
    });
    out->sizes[0] = found;
    return int{kSuccess};
  };
})

// ---- cross entropy; reductions are 0 none, 1 mean, 2 sum

namespace {

// For each row of `scores`: the offset of its label, and the weight of that label; visit(row,
// offset, weight). Rows whose label is `ignored` are left out.
template <class Visit>
int each_label(const Tensor& scores, const Tensor& labels, const Tensor& weights, int64_t ignored,
               Visit visit) {
  for (int64_t i = 0; i < scores.sizes[0]; ++i) {
    const int64_t label = read<int64_t>(labels, i * labels.strides[0]);
    if (label == ignored) continue;
    if (label < 0 || label >= scores.sizes[1])
      return fail(kAclnnParam, "label %lld of %lld", static_cast<long long>(label),
                  static_cast<long long>(scores.sizes[1]));
    visit(i, i * scores.strides[0] + label * scores.strides[1],
          read<double>(weights, label * weights.strides[0]));
  }
  return kSuccess;
}

}  // namespace

OPERATOR(aclnnNLLLoss, (In self, In target, In weight, int64_t reduction, int64_t ignored, Out out,
                        Out total_weight), {
  const Tensor scores = operand(self), labels = operand(target), weights = operand(weight);
  const Tensor to = operand(out), total = operand(total_weight);
  if (scores.rank() != 2 || reduction == 0) refuse("only a sum or mean over rows is simulated");
  return [=] {
    double sum = 0, weight_sum = 0;
    const int code = each_label(scores, labels, weights, ignored, [&](int64_t, int64_t at, double w) {
      sum -= w * read<double>(scores, at);
      weight_sum += w;
    });
    store(to.dtype, to.data, reduction == 1 ? sum / weight_sum : sum);
    store(total.dtype, total.data, weight_sum);
    return code;
  };
})
OPERATOR(aclnnNLLLossBackward, (In grad, In self, In target, In weight, int64_t reduction,
                                int64_t ignored, In total_weight, Out out), {
  const Tensor g = operand(grad), labels = operand(target), weights = operand(weight);
  const Tensor total = operand(total_weight), to = operand(out);
  if (operand(self).sizes != to.sizes || reduction == 0) refuse("only a sum or mean is simulated");
  return in_turn({fill(to, {0, 0}), [=] {
    const double scale = read<double>(g, 0) / (reduction == 1 ? read<double>(total, 0) : 1);
    return each_label(to, labels, weights, ignored, [&](int64_t, int64_t at, double w) {
      store(to.dtype, to.at(at), -w * scale);
    });
  }});
})
