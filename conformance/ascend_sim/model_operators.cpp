// What a small language model needs to train: norms, rotary positions, attention, cross entropy,
// embeddings and a choice of experts. The same rules as in operators.cpp.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "operators.h"

using namespace sim;

UNARY(Silu, x / (1 + std::exp(-x)))
UNARY(Sigmoid, 1 / (1 + std::exp(-x)))
UNARY(Cos, std::cos(x))
UNARY(Sin, std::sin(x))
UNARY(Exp, std::exp(x))
UNARY(Rsqrt, 1 / std::sqrt(x))
UNARY(BitwiseNot, ~static_cast<int64_t>(x))

OPERATOR(aclnnPowScalarTensor, (Number base, In exponent, Out out), {
  const double b = operand(base).real;
  return elementwise(operand(out), [=](auto x) {
    return static_cast<decltype(x)>(std::pow(b, static_cast<double>(x)));
  }, operand(exponent));
})
OPERATOR(aclnnSiluBackward, (In grad, In self, Out out), {
  return elementwise(operand(out), [](auto g, auto x) {
    const auto s = 1 / (1 + std::exp(-x));
    return static_cast<decltype(g)>(g * s * (1 + x * (1 - s)));
  }, operand(grad), operand(self));
})
OPERATOR(aclnnInplaceMaskedFillScalar, (Out self, In mask, Number value), {
  const Scalar v = operand(value);
  return elementwise(operand(self), [=](auto x, auto m) { return m != 0 ? v.as<decltype(x)>() : x; },
                     operand(self), operand(mask));
})
OPERATOR(aclnnSWhere, (In condition, In x, In y, Out out), {
  return elementwise(operand(out), [](auto c, auto a, auto b) { return c != 0 ? a : b; },
                     operand(condition), operand(x), operand(y));
})
// Either limit may be null.
OPERATOR(aclnnClamp, (In self, Number least, Number most, Out out), {
  const double infinity = std::numeric_limits<double>::infinity();
  const double low = least ? operand(least).real : -infinity;
  const double high = most ? operand(most).real : infinity;
  return elementwise(operand(out), [=](auto x) {
    return static_cast<decltype(x)>(x < low ? low : x > high ? high : static_cast<double>(x));
  }, operand(self));
})
OPERATOR(aclnnTriu, (In self, int64_t diagonal, Out out), {
  const Tensor from = operand(self), to = operand(out);
  const Ints strides = broadcast(from, to.sizes);
  const int64_t last = to.rank() - 1;
  return [=] {
    Ints index(to.sizes.size(), 0);
    walk(to.sizes, std::array<Ints, 2>{to.strides, strides}, [&](const auto& at) {
      const bool kept = index[last] - index[last - 1] >= diagonal;
      if (kept) {
        std::memcpy(to.at(at[0]), from.at(at[1]), to.step());
      } else {
        std::memset(to.at(at[0]), 0, to.step());
      }
      for (int64_t d = last; d >= 0 && ++index[d] == to.sizes[d]; --d) index[d] = 0;
    });
    return int{kSuccess};
  };
})

// ---- along one dimension: rows are read into doubles, worked on, and written back

namespace {

// `in` and `out` without `dim`; f(row of each input) -> row of the output.
template <class Make, size_t N>
Task by_rows(Tensor out, const std::array<Tensor, N>& ins, int64_t dim, Make make) {
  const int64_t axis = wrap(dim, out.rank()), length = out.sizes[axis];
  Ints rest = out.sizes;
  rest[axis] = 1;
  std::array<Ints, N + 1> strides;
  strides[0] = out.strides;
  for (size_t n = 0; n < N; ++n) {
    if (ins[n].sizes != out.sizes) refuse("shapes differ");
    strides[n + 1] = ins[n].strides;
  }
  return [=] {
    std::array<std::vector<double>, N> rows;
    for (auto& row : rows) row.resize(length);
    std::vector<double> result(length);
    walk(rest, strides, [&](const auto& at) {
      for (size_t n = 0; n < N; ++n)
        for (int64_t i = 0; i < length; ++i)
          rows[n][i] = load<double>(ins[n].dtype, ins[n].at(at[n + 1] + i * ins[n].strides[axis]));
      make(rows, result);
      for (int64_t i = 0; i < length; ++i)
        store(out.dtype, out.at(at[0] + i * out.strides[axis]), result[i]);
    });
    return int{kSuccess};
  };
}

using Row = std::vector<double>;

double log_of_sum(const Row& row) {
  const double top = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (double x : row) sum += std::exp(x - top);
  return top + std::log(sum);
}

}  // namespace

OPERATOR(aclnnSoftmax, (In self, int64_t dim, Out out), {
  return by_rows(operand(out), std::array{operand(self)}, dim, [](const auto& rows, Row& result) {
    const double whole = log_of_sum(rows[0]);
    for (size_t i = 0; i < result.size(); ++i) result[i] = std::exp(rows[0][i] - whole);
  });
})
OPERATOR(aclnnLogSoftmax, (In self, int64_t dim, Out out), {
  return by_rows(operand(out), std::array{operand(self)}, dim, [](const auto& rows, Row& result) {
    const double whole = log_of_sum(rows[0]);
    for (size_t i = 0; i < result.size(); ++i) result[i] = rows[0][i] - whole;
  });
})
OPERATOR(aclnnSoftmaxBackward, (In grad, In output, int64_t dim, Out out), {
  return by_rows(operand(out), std::array{operand(grad), operand(output)}, dim,
                 [](const auto& rows, Row& result) {
    const double dot = std::inner_product(rows[0].begin(), rows[0].end(), rows[1].begin(), 0.0);
    for (size_t i = 0; i < result.size(); ++i) result[i] = rows[1][i] * (rows[0][i] - dot);
  });
})
OPERATOR(aclnnLogSoftmaxBackward, (In grad, In output, int64_t dim, Out out), {
  return by_rows(operand(out), std::array{operand(grad), operand(output)}, dim,
                 [](const auto& rows, Row& result) {
    const double sum = std::accumulate(rows[0].begin(), rows[0].end(), 0.0);
    for (size_t i = 0; i < result.size(); ++i)
      result[i] = rows[0][i] - std::exp(rows[1][i]) * sum;
  });
})

// ---- by index

namespace {

// The indices as numbers; out of range is an error of the task, as on the device.
int64_t index_at(const Tensor& indices, int64_t offset) {
  return load<int64_t>(indices.dtype, indices.at(offset));
}

int out_of_range(const char* name, int64_t index, int64_t size) {
  return fail(kAclnnParam, "%s: index %lld of %lld", name, static_cast<long long>(index),
              static_cast<long long>(size));
}

}  // namespace

OPERATOR(aclnnEmbedding, (In weight, In indices, Out out), {
  const Tensor table = operand(weight), where = operand(indices), to = operand(out);
  const std::array<Ints, 2> strides{Ints(to.strides.begin(), to.strides.end() - 1), where.strides};
  return [=] {
    int code = kSuccess;
    walk(where.sizes, strides, [&](const auto& at) {
      const int64_t index = index_at(where, at[1]);
      if (index < 0 || index >= table.sizes[0]) {
        code = out_of_range("aclnnEmbedding", index, table.sizes[0]);
        return;
      }
      for (int64_t k = 0; k < table.sizes[1]; ++k)
        std::memcpy(to.at(at[0] + k * to.strides.back()),
                    table.at(index * table.strides[0] + k * table.strides[1]), to.step());
    });
    return code;
  };
})
OPERATOR(aclnnEmbeddingDenseBackward,
         (In grad, In indices, uint64_t, uint64_t padding, bool scale, Out out), {
  const Tensor from = operand(grad), where = operand(indices), to = operand(out);
  if (scale) refuse("scale_grad_by_freq is not simulated");
  const std::array<Ints, 2> strides{Ints(from.strides.begin(), from.strides.end() - 1),
                                    where.strides};
  return [=] {
    const int64_t width = to.sizes[1];
    std::vector<double> sums(to.sizes[0] * width, 0);
    int code = kSuccess;
    walk(where.sizes, strides, [&](const auto& at) {
      const int64_t index = index_at(where, at[1]);
      if (index == static_cast<int64_t>(padding)) return;
      if (index < 0 || index >= to.sizes[0]) {
        code = out_of_range("aclnnEmbeddingDenseBackward", index, to.sizes[0]);
        return;
      }
      for (int64_t k = 0; k < width; ++k)
        sums[index * width + k] +=
            load<double>(from.dtype, from.at(at[0] + k * from.strides.back()));
    });
    size_t i = 0;
    walk(to.sizes, std::array<Ints, 1>{to.strides},
         [&](const auto& at) { store(to.dtype, to.at(at[0]), sums[i++]); });
    return code;
  };
})

// Each element of `dim` becomes `repeats` neighbours; backwards they are summed.
OPERATOR(aclnnRepeatInterleaveIntWithDim, (In self, int64_t repeats, int64_t dim, int64_t, Out out), {
  const Tensor from = operand(self), to = operand(out);
  const int64_t axis = wrap(dim, from.rank());
  if (to.sizes[axis] != from.sizes[axis] * repeats) refuse("the output does not fit");
  std::vector<Task> tasks;
  for (int64_t i = 0; i < to.sizes[axis]; ++i)
    tasks.push_back(copy(narrow(to, axis, i, 1), narrow(from, axis, i / repeats, 1)));
  return for_each(tasks.size(), [&](size_t i) { return tasks[i]; });
})
OPERATOR(aclnnRepeatInterleaveGrad, (In grad, In repeats, int64_t dim, Out out), {
  const Tensor from = operand(grad), counts = operand(repeats), to = operand(out);
  const int64_t axis = wrap(dim, from.rank());
  return [=] {
    if (int code = fill(to, {0, 0})()) return code;
    int64_t next = 0;
    for (int64_t i = 0; i < to.sizes[axis]; ++i) {
      const Tensor target = narrow(to, axis, i, 1);
      const int64_t at = counts.count() == 1 ? 0 : i * counts.strides[0];
      for (int64_t n = index_at(counts, at); n > 0; --n) {
        const Tensor part = narrow(from, axis, next++, 1);
        const auto add = [](auto x, auto y) { return static_cast<decltype(x)>(x + y); };
        if (int code = elementwise(target, add, target, part)()) return code;
      }
    }
    return int{kSuccess};
  };
})

// ---- cross entropy; reductions are 0 none, 1 mean, 2 sum

OPERATOR(aclnnNLLLoss, (In self, In target, In weight, int64_t reduction, int64_t ignored, Out out,
                        Out total_weight), {
  const Tensor from = operand(self), where = operand(target), weights = operand(weight);
  const Tensor to = operand(out), total = operand(total_weight);
  if (from.rank() != 2) refuse("only rows of scores are simulated");
  return [=] {
    double sum = 0, weight_sum = 0;
    for (int64_t i = 0; i < from.sizes[0]; ++i) {
      const int64_t label = index_at(where, i * where.strides[0]);
      double loss = 0;
      if (label != ignored) {
        if (label < 0 || label >= from.sizes[1])
          return out_of_range("aclnnNLLLoss", label, from.sizes[1]);
        const double w = load<double>(weights.dtype, weights.at(label * weights.strides[0]));
        loss = -w * load<double>(from.dtype, from.at(i * from.strides[0] + label * from.strides[1]));
        sum += loss;
        weight_sum += w;
      }
      if (reduction == 0) store(to.dtype, to.at(i * to.strides[0]), loss);
    }
    if (reduction != 0) store(to.dtype, to.data, reduction == 1 ? sum / weight_sum : sum);
    store(total.dtype, total.data, weight_sum);
    return int{kSuccess};
  };
})
OPERATOR(aclnnNLLLossBackward, (In grad, In self, In target, In weight, int64_t reduction,
                                int64_t ignored, In total_weight, Out out), {
  const Tensor g = operand(grad), where = operand(target), weights = operand(weight);
  const Tensor total = operand(total_weight), to = operand(out);
  if (operand(self).sizes != to.sizes) refuse("shapes differ");
  return [=] {
    if (int code = fill(to, {0, 0})()) return code;
    for (int64_t i = 0; i < to.sizes[0]; ++i) {
      const int64_t label = index_at(where, i * where.strides[0]);
      if (label == ignored) continue;
      if (label < 0 || label >= to.sizes[1])
        return out_of_range("aclnnNLLLossBackward", label, to.sizes[1]);
      const double w = load<double>(weights.dtype, weights.at(label * weights.strides[0]));
      const int64_t from = reduction == 0 ? i * g.strides[0] : 0;
      double value = -w * load<double>(g.dtype, g.at(from));
      if (reduction == 1) value /= load<double>(total.dtype, total.data);
      store(to.dtype, to.at(i * to.strides[0] + label * to.strides[1]), value);
    }
    return int{kSuccess};
  };
})
