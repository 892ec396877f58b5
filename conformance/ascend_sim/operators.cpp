// The operators that checkpointing and the optimizers need.
//
// Arithmetic is done in float (double for double, int64 for integers) and rounded once, on storing;
// reductions and matrix products accumulate in double. Rounding is therefore close to Ascend's,
// never equal.
#include "operators.h"

#include <cmath>
#include <limits>

using namespace sim;

// ---- copies, casts, layout: one strided copy does them all

Task sim::copy(Tensor out, Tensor in) {
  const bool same = out.dtype == in.dtype;
  if (same && out.sizes == in.sizes && out.dense() && in.dense()) {
    return [=] {
      std::memmove(out.data, in.data, static_cast<size_t>(out.count()) * out.step());
      return int{kSuccess};
    };
  }
  const std::array<Ints, 2> strides{out.strides, broadcast(in, out.sizes)};
  return [=] {
    walk(out.sizes, strides, [&](const auto& at) {
      if (same) {
        std::memcpy(out.at(at[0]), in.at(at[1]), out.step());
      } else if (is_floating(in.dtype)) {
        store(out.dtype, out.at(at[0]), read<double>(in, at[1]));
      } else {
        store(out.dtype, out.at(at[0]), read<int64_t>(in, at[1]));
      }
    });
    return int{kSuccess};
  };
}

Task sim::fill(Tensor out, Scalar value) {
  return elementwise(out, [](auto x) { return x; }, value);
}

Tensor sim::narrow(Tensor t, int64_t dim, int64_t start, int64_t length) {
  if (start < 0 || start + length > t.sizes[dim]) refuse("parts do not fit the output");
  if (t.data) t.data = t.at(start * t.strides[dim]);
  t.sizes[dim] = length;
  return t;
}

Tensor sim::repeated(Tensor t, int64_t dim, int64_t size) {
  t.sizes.insert(t.sizes.begin() + dim, size);
  t.strides.insert(t.strides.begin() + dim, 0);
  return t;
}

namespace {

Task concatenate(const std::vector<Tensor>& parts, int64_t dim, const Tensor& out) {
  int64_t start = 0;
  std::vector<Task> tasks;
  for (const Tensor& part : parts) {
    if (part.rank() == 1 && part.sizes[0] == 0) continue;  // torch lets an empty vector through
    if (part.rank() != out.rank()) refuse("parts of another rank");
    tasks.push_back(copy(narrow(out, dim, start, part.sizes[dim]), part));
    start += part.sizes[dim];
  }
  return in_turn(std::move(tasks));
}

}  // namespace

OPERATOR(aclnnInplaceCopy, (Out self, In from), { return copy(operand(self), operand(from)); })
OPERATOR(aclnnInplaceZero, (Out self), { return fill(operand(self), {0, 0}); })
OPERATOR(aclnnInplaceOne, (Out self), { return fill(operand(self), {1, 1}); })
OPERATOR(aclnnInplaceFillScalar, (Out self, Number value),
         { return fill(operand(self), operand(value)); })
OPERATOR(aclnnCat, (List parts, int64_t dim, Out out), {
  const Tensor to = operand(out);
  return concatenate(operand(parts), wrap(dim, to.rank()), to);
})
OPERATOR(aclnnStack, (List parts, int64_t dim, Out out), {
  const Tensor to = operand(out);
  const int64_t at = wrap(dim, to.rank());
  std::vector<Tensor> items = operand(parts);
  for (Tensor& item : items) item = repeated(item, at, 1);
  return concatenate(items, at, to);
})
OPERATOR(aclnnConstantPadNd, (In self, Dims pads, Number value, Out out), {
  const Tensor from = operand(self), to = operand(out);
  const Ints pad = operand(pads);  // pairs (before, after), last dimension first
  Tensor middle = to;
  for (size_t i = 0; 2 * i < pad.size(); ++i) {
    const int64_t dim = from.rank() - 1 - static_cast<int64_t>(i);
    middle = narrow(middle, dim, pad[2 * i], from.sizes[dim]);
  }
  return in_turn({fill(to, operand(value)), copy(middle, from)});
})
OPERATOR(aclnnArange, (Number start, Number, Number step, Out out), {
  const Tensor to = operand(out);
  const Scalar first = operand(start), by = operand(step);
  return [=] {
    in_working_type({is_floating(to.dtype) ? kDouble : kInt64}, [&](auto zero) {
      using T = decltype(zero);
      for (int64_t i = 0; i < to.count(); ++i)
        store(to.dtype, to.at(i * to.strides[0]),
              read<T>(first, 0) + static_cast<T>(i) * read<T>(by, 0));
    });
    return int{kSuccess};
  };
})

// ---- elementwise arithmetic and comparisons

BOTH_FORMS(Add, (In y, Number alpha), kAdd, y, alpha)
BOTH_FORMS(Adds, (Number y, Number alpha), kAdd, y, alpha)
BOTH_FORMS(Sub, (In y, Number alpha), kSub, y, alpha)
BOTH_FORMS(Subs, (Number y, Number alpha), kSub, y, alpha)
BOTH_FORMS(Mul, (In y), kMul, y)
BOTH_FORMS(Muls, (Number y), kMul, y)
BOTH_FORMS(Div, (In y), kDiv, y)
BOTH_FORMS(Divs, (Number y), kDiv, y)
BOTH_FORMS(Addcmul, (In y, In z, Number value), kAddcmul, y, z, value)
BOTH_FORMS(Addcdiv, (In y, In z, Number value), kAddcdiv, y, z, value)
BOTH_FORMS(Lerps, (In y, Number weight), kLerp, y, weight)
OPERATOR(aclnnRsubs, (In x, Number y, Number alpha, Out out), {
  return pointwise(out, [](auto a, auto from, auto times) { return from - times * a; }, x, y, alpha);
})
OPERATOR(aclnnPowTensorScalar, (In x, Number y, Out out), {
  return pointwise(out, [](auto a, auto b) { return std::pow(double(a), double(b)); }, x, y);
})
UNARY(Sqrt, std::sqrt(x))
UNARY(Neg, -x)
UNARY(Abs, x < 0 ? -x : x)
UNARY(Reciprocal, divide(decltype(x)(1), x))

#define COMPARISON(Name, op) \
  OPERATOR(aclnn##Name##Tensor, (In a, In b, Out out), { \
    return pointwise(out, [](auto x, auto y) { return int64_t(x op y); }, a, b); \
  }) \
  OPERATOR(aclnn##Name##Scalar, (In a, Number b, Out out), { \
    return pointwise(out, [](auto x, auto y) { return int64_t(x op y); }, a, b); \
  })
COMPARISON(Eq, ==)
COMPARISON(Ne, !=)
COMPARISON(Le, <=)
COMPARISON(Gt, >)

OPERATOR(aclnnIsClose, (In a, In b, double rtol, double atol, bool equal_nan, Out out), {
  return pointwise(out, [=](auto x, auto y) {
    const double p = static_cast<double>(x), q = static_cast<double>(y);
    if (std::isnan(p) && std::isnan(q)) return int64_t{equal_nan};
    if (p == q) return int64_t{1};
    if (!std::isfinite(p) || !std::isfinite(q)) return int64_t{0};
    return int64_t{std::fabs(p - q) <= atol + rtol * std::fabs(q)};
  }, a, b);
})
OPERATOR(aclnnEqual, (In a, In b, Out out), {
  const Tensor x = operand(a), y = operand(b), to = operand(out);
  return [=] {
    bool equal = x.sizes == y.sizes;
    if (equal) {
      in_working_type({x.dtype, y.dtype}, [&](auto zero) {
        using T = decltype(zero);
        walk(x.sizes, std::array<Ints, 2>{x.strides, y.strides},
             [&](const auto& at) { equal &= read<T>(x, at[0]) == read<T>(y, at[1]); });
      });
    }
    store(to.dtype, to.data, int64_t{equal});
    return int{kSuccess};
  };
})

// ---- reductions

Task sim::reduce(Tensor in, const Ints& dims, Tensor out, double start,
                 double (*fold)(double, double), double (*finish)(double, double)) {
  std::vector<char> gone(in.sizes.size(), dims.empty());
  for (int64_t dim : dims) gone[wrap(dim, in.rank())] = 1;
  Ints places(in.sizes.size(), 0);  // strides into the folded values; 0 where folded
  int64_t kept = 1;
  for (int64_t d = in.rank() - 1; d >= 0; --d) {
    if (gone[d]) continue;
    places[d] = kept;
    kept *= in.sizes[d];
  }
  if (kept != out.count()) refuse("the output does not fit the reduction");
  const double count = static_cast<double>(in.count()) / static_cast<double>(kept);
  return [=] {
    std::vector<double> values(kept, start);
    walk(in.sizes, std::array<Ints, 2>{in.strides, places}, [&](const auto& at) {
      values[at[1]] = fold(values[at[1]], read<double>(in, at[0]));
    });
    size_t i = 0;
    walk(out.sizes, std::array<Ints, 1>{out.strides}, [&](const auto& at) {
      store(out.dtype, out.at(at[0]), finish(values[i++], count));
    });
    return int{kSuccess};
  };
}

OPERATOR(aclnnReduceSum, (In self, Dims dims, bool, int, Out out),
         { return reduce(operand(self), operand(dims), operand(out), 0, sum_of, itself); })
OPERATOR(aclnnMean, (In self, Dims dims, bool, int, Out out), {
  return reduce(operand(self), operand(dims), operand(out), 0, sum_of,
                [](double value, double count) { return value / count; });
})
OPERATOR(aclnnAll, (In self, Dims dims, bool, Out out), {
  return reduce(operand(self), operand(dims), operand(out), 1,
                [](double a, double b) { return double(a && b); }, itself);
})
OPERATOR(aclnnAny, (In self, Dims dims, bool, Out out), {
  return reduce(operand(self), operand(dims), operand(out), 0,
                [](double a, double b) { return double(a || b); }, itself);
})
OPERATOR(aclnnMax, (In self, Out out), {
  return reduce(operand(self), {}, operand(out), -std::numeric_limits<double>::infinity(),
                [](double a, double b) { return a > b ? a : b; }, itself);
})
OPERATOR(aclnnMin, (In self, Out out), {
  return reduce(operand(self), {}, operand(out), std::numeric_limits<double>::infinity(),
                [](double a, double b) { return a < b ? a : b; }, itself);
})
OPERATOR(aclnnLinalgVectorNorm, (In self, Number ord, Dims dims, bool, int, Out out), {
  if (operand(ord).real != 2) refuse("only the 2-norm is simulated");
  return reduce(operand(self), operand(dims), operand(out), 0,
                [](double a, double b) { return a + b * b; },
                [](double value, double) { return std::sqrt(value); });
})

// ---- matrix products, with dimensions of batches in front

OPERATOR(aclnnMatmul, (In left, In right, Out result, int8_t), {
  const Tensor a = operand(left), b = operand(right), out = operand(result);
  const int64_t rank = out.rank();
  if (rank < 2 || a.rank() < 2 || b.rank() < 2) refuse("only matrices are simulated");
  const int64_t rows = out.sizes[rank - 2], columns = out.sizes[rank - 1], depth = a.sizes.back();
  if (a.sizes[a.rank() - 2] != rows || b.sizes[b.rank() - 2] != depth || b.sizes.back() != columns)
    refuse("shapes do not multiply");
  // The batch: one walk over all three, with the last two dimensions cut off.
  const auto batch = [](Tensor t) {
    t.sizes.resize(t.rank() - 2);
    t.strides.resize(t.sizes.size());
    return t;
  };
  const Tensor many = batch(out);
  const std::array<Ints, 3> strides{many.strides, broadcast(batch(a), many.sizes),
                                    broadcast(batch(b), many.sizes)};
  const auto place = [](const Tensor& t, int64_t row, int64_t column) {
    return row * t.strides[t.rank() - 2] + column * t.strides.back();
  };
  return [=] {
    walk(many.sizes, strides, [&](const auto& at) {
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
          double sum = 0;
          for (int64_t k = 0; k < depth; ++k)
            sum += read<double>(a, at[1] + place(a, i, k)) * read<double>(b, at[2] + place(b, k, j));
          store(out.dtype, out.at(at[0] + place(out, i, j)), sum);
        }
    });
    return int{kSuccess};
  };
})

// ---- random numbers: a counter-based generator, not Ascend's

namespace {

uint64_t mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// In (0, 1), a function of seed, offset and counter alone.
double uniform(uint64_t seed, uint64_t offset, uint64_t counter) {
  const uint64_t bits = mixed(mixed(seed) ^ mixed(offset * 0x1000003u + counter));
  return (static_cast<double>(bits >> 11) + 0.5) / 9007199254740992.0;
}

template <class Draw>
Task draw_into(Tensor out, Draw draw) {
  return [=] {
    uint64_t counter = 0;
    walk(out.sizes, std::array<Ints, 1>{out.strides},
         [&](const auto& at) { store(out.dtype, out.at(at[0]), draw(counter++)); });
    return int{kSuccess};
  };
}

}  // namespace

OPERATOR(aclnnInplaceNormal, (Out self, float mean, float deviation, int64_t seed, int64_t offset), {
  return draw_into(operand(self), [=](uint64_t i) {
    const double a = uniform(seed, offset, 2 * i), b = uniform(seed, offset, 2 * i + 1);
    return mean + deviation * std::sqrt(-2 * std::log(a)) * std::cos(6.283185307179586 * b);
  });
})
OPERATOR(aclnnInplaceUniform, (Out self, double low, double high, uint64_t seed, uint64_t offset), {
  return draw_into(operand(self),
                   [=](uint64_t i) { return low + (high - low) * uniform(seed, offset, i); });
})

// ---- lists of tensors (foreach optimizers)

OPERATOR(aclnnForeachCopy, (List in, OutList out), {
  const std::vector<Tensor> to = operand(static_cast<List>(out)), from = operand(in);
  if (to.size() != from.size()) refuse("lists of different length");
  std::vector<Task> tasks;
  for (size_t i = 0; i < to.size(); ++i) tasks.push_back(copy(to[i], from[i]));
  return in_turn(std::move(tasks));
})
OPERATOR(aclnnForeachSqrt, (List in, OutList out),
         { return foreach(out, [](auto x) { return std::sqrt(x); }, in); })
OPERATOR(aclnnForeachAddScalarV2, (List in, Number y, OutList out),
         { return foreach(out, [](auto a, auto b) { return a + b; }, in, y); })
OPERATOR(aclnnForeachMulScalarV2, (List in, Number y, OutList out),
         { return foreach(out, kMul, in, y); })
OPERATOR(aclnnForeachDivScalarList, (List in, Numbers y, OutList out),
         { return foreach(out, kDiv, in, y); })
// The weight is a scalar here, unlike in other list operators without V2.
OPERATOR(aclnnForeachLerpScalar, (List in, List end, Number weight, OutList out),
         { return foreach(out, kLerp, in, end, weight); })
OPERATOR(aclnnForeachAddcmulScalarV2, (List in, List a, List b, Number value, OutList out),
         { return foreach(out, kAddcmul, in, a, b, value); })

// ---- fused AdamW, one tensor at a time; torch_npu hands over the step before this one
OPERATOR(aclnnApplyAdamWV2,
         (Out var, Out first, Out second, Out max_second, In grad, In step, float lr, float beta1,
          float beta2, float decay, float eps, bool amsgrad, bool maximize), {
  if (amsgrad || max_second) refuse("amsgrad is not simulated");
  const Tensor p = operand(var), m = operand(first), v = operand(second), g = operand(grad),
               steps = operand(step);
  const std::array<Ints, 4> strides{p.strides, m.strides, v.strides, g.strides};
  if (m.sizes != p.sizes || v.sizes != p.sizes || g.sizes != p.sizes) refuse("shapes differ");
  return [=] {
    const double t = read<double>(steps, 0) + 1;
    const float correction1 = static_cast<float>(1 - std::pow(double{beta1}, t));
    const float correction2 = static_cast<float>(std::sqrt(1 - std::pow(double{beta2}, t)));
    walk(p.sizes, strides, [&](const auto& at) {
      const float raw = read<float>(g, at[3]), gradient = maximize ? -raw : raw;
      const float mean = kLerp(read<float>(m, at[1]), gradient, 1 - beta1);
      const float square = beta2 * read<float>(v, at[2]) + (1 - beta2) * gradient * gradient;
      const float decayed = read<float>(p, at[0]) * (1 - lr * decay);
      const float update = lr / correction1 * mean / (std::sqrt(square) / correction2 + eps);
      store(p.dtype, p.at(at[0]), decayed - update);
      store(m.dtype, m.at(at[1]), mean);
      store(v.dtype, v.at(at[2]), square);
    });
    return int{kSuccess};
  };
})
