// The operators that checkpointing and the optimizers need.
//
// Arithmetic is done in float (double for double, int64 for integers) and rounded once, on storing;
// reductions and matrix products accumulate in double. Rounding is therefore close to Ascend's, never
// equal.
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
    walk(out.sizes, strides, [&](const auto& offsets) {
      char* to = out.at(offsets[0]);
      const char* from = in.at(offsets[1]);
      if (same) {
        std::memcpy(to, from, out.step());
      } else if (is_floating(in.dtype)) {
        store(out.dtype, to, load<double>(in.dtype, from));
      } else {
        store(out.dtype, to, load<int64_t>(in.dtype, from));
      }
    });
    return int{kSuccess};
  };
}

Task sim::fill(Tensor out, Scalar value) {
  return [=] {
    walk(out.sizes, std::array<Ints, 1>{out.strides}, [&](const auto& offsets) {
      if (is_floating(out.dtype)) {
        store(out.dtype, out.at(offsets[0]), value.real);
      } else {
        store(out.dtype, out.at(offsets[0]), value.whole);
      }
    });
    return int{kSuccess};
  };
}

Tensor sim::narrow(Tensor t, int64_t dim, int64_t start, int64_t length) {
  if (start < 0 || start + length > t.sizes[dim]) refuse("parts do not fit the output");
  if (t.data) t.data = t.at(start * t.strides[dim]);
  t.sizes[dim] = length;
  return t;
}

namespace {

Task concatenate(const std::vector<Tensor>& parts, int64_t dim, const Tensor& out) {
  int64_t start = 0;
  std::vector<Task> tasks;
  for (const Tensor& part : parts) {
    if (part.rank() == 1 && part.sizes[0] == 0) continue;  // torch lets an empty vector through
    if (part.rank() != out.rank()) refuse("parts of another rank");
    const int64_t length = part.sizes[dim];
    tasks.push_back(copy(narrow(out, dim, start, length), part));
    start += length;
  }
  return for_each(tasks.size(), [&](size_t i) { return tasks[i]; });
}

}  // namespace

OPERATOR(aclnnInplaceCopy, (Out self, In from), { return copy(operand(self), operand(from)); })
OPERATOR(aclnnCast, (In self, int, Out out), { return copy(operand(out), operand(self)); })
OPERATOR(aclnnInplaceZero, (Out self), { return fill(operand(self), {0, 0}); })
OPERATOR(aclnnInplaceOne, (Out self), { return fill(operand(self), {1, 1}); })
OPERATOR(aclnnInplaceFillScalar, (Out self, Number value),
         { return fill(operand(self), operand(value)); })
OPERATOR(aclnnInplaceFillTensor, (Out self, In value),
         { return copy(operand(self), operand(value)); })
OPERATOR(aclnnCat, (List parts, int64_t dim, Out out), {
  const Tensor to = operand(out);
  return concatenate(operand(parts), wrap(dim, to.rank()), to);
})
OPERATOR(aclnnStack, (List parts, int64_t dim, Out out), {
  const Tensor to = operand(out);
  const int64_t at = wrap(dim, to.rank());
  std::vector<Tensor> items = operand(parts);
  for (Tensor& item : items) {
    item.sizes.insert(item.sizes.begin() + at, 1);
    item.strides.insert(item.strides.begin() + at, 0);
  }
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
  const std::array<Task, 2> tasks{fill(to, operand(value)), copy(middle, from)};
  return for_each(2, [&](size_t i) { return tasks[i]; });
})
OPERATOR(aclnnArange, (Number start, Number, Number step, Out out), {
  const Tensor to = operand(out);
  const Scalar first = operand(start), by = operand(step);
  return [=] {
    for (int64_t i = 0; i < to.count(); ++i) {
      char* at = to.at(i * to.strides[0]);
      if (is_floating(to.dtype)) {
        store(to.dtype, at, first.real + static_cast<double>(i) * by.real);
      } else {
        store(to.dtype, at, first.whole + i * by.whole);
      }
    }
    return int{kSuccess};
  };
})

// ---- elementwise arithmetic

namespace {

// A scalar operand next to tensor operands, in their type.
template <class T>
T divide(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return b ? a / b : 0;
  } else {
    return a / b;
  }
}

template <class T>
T interpolate(T a, T b, T weight) {
  return std::fabs(static_cast<double>(weight)) < 0.5 ? a + weight * (b - a)
                                                      : b - (b - a) * (1 - weight);
}

// Functors, so that the plain, scalar, in-place and list forms of an operator share one line.
struct Add {
  template <class T> static T of(T x, T y, T alpha) { return x + alpha * y; }
};
struct Sub {
  template <class T> static T of(T x, T y, T alpha) { return x - alpha * y; }
};
struct Mul {
  template <class T> static T of(T x, T y) { return x * y; }
};
struct Div {
  template <class T> static T of(T x, T y) { return divide(x, y); }
};
struct Addcmul {
  template <class T> static T of(T x, T y, T z, T value) { return x + value * y * z; }
};
struct Addcdiv {
  template <class T> static T of(T x, T y, T z, T value) { return x + value * divide(y, z); }
};

// op(x, y, alpha) with y a tensor or a scalar, op(x, y) likewise, op(x, y, z, value).
template <class Op>
Task with_alpha(Tensor out, Tensor x, Tensor y, Scalar alpha) {
  return elementwise(out, [=](auto a, auto b) { return Op::of(a, b, alpha.as<decltype(a)>()); },
                     x, y);
}
template <class Op>
Task with_alpha(Tensor out, Tensor x, Scalar y, Scalar alpha) {
  return elementwise(out, [=](auto a) {
    using T = decltype(a);
    return Op::of(a, y.as<T>(), alpha.as<T>());
  }, x);
}
template <class Op>
Task binary(Tensor out, Tensor x, Tensor y) {
  return elementwise(out, [](auto a, auto b) { return Op::of(a, b); }, x, y);
}
template <class Op>
Task binary(Tensor out, Tensor x, Scalar y) {
  return elementwise(out, [=](auto a) { return Op::of(a, y.as<decltype(a)>()); }, x);
}
template <class Op>
Task ternary(Tensor out, Tensor x, Tensor y, Tensor z, Scalar value) {
  return elementwise(
      out, [=](auto a, auto b, auto c) { return Op::of(a, b, c, value.as<decltype(a)>()); }, x, y,
      z);
}
Task lerp(Tensor out, Tensor x, Tensor y, Scalar weight) {
  return elementwise(
      out, [=](auto a, auto b) { return interpolate(a, b, weight.as<decltype(a)>()); }, x, y);
}

}  // namespace

#define WITH_ALPHA(Op)                                                                  \
  OPERATOR(aclnn##Op, (In x, In y, Number alpha, Out out),                              \
           { return with_alpha<Op>(operand(out), operand(x), operand(y), operand(alpha)); }) \
  OPERATOR(aclnnInplace##Op, (Out x, In y, Number alpha),                               \
           { return with_alpha<Op>(operand(x), operand(x), operand(y), operand(alpha)); }) \
  OPERATOR(aclnn##Op##s, (In x, Number y, Number alpha, Out out),                       \
           { return with_alpha<Op>(operand(out), operand(x), operand(y), operand(alpha)); }) \
  OPERATOR(aclnnInplace##Op##s, (Out x, Number y, Number alpha),                        \
           { return with_alpha<Op>(operand(x), operand(x), operand(y), operand(alpha)); })
WITH_ALPHA(Add)
WITH_ALPHA(Sub)

#define BINARY(Op)                                                                      \
  OPERATOR(aclnn##Op, (In x, In y, Out out),                                            \
           { return binary<Op>(operand(out), operand(x), operand(y)); })                \
  OPERATOR(aclnnInplace##Op, (Out x, In y),                                             \
           { return binary<Op>(operand(x), operand(x), operand(y)); })                  \
  OPERATOR(aclnn##Op##s, (In x, Number y, Out out),                                     \
           { return binary<Op>(operand(out), operand(x), operand(y)); })                \
  OPERATOR(aclnnInplace##Op##s, (Out x, Number y),                                      \
           { return binary<Op>(operand(x), operand(x), operand(y)); })
BINARY(Mul)
BINARY(Div)

#define TERNARY(Op)                                                                     \
  OPERATOR(aclnn##Op, (In x, In y, In z, Number value, Out out), {                      \
    return ternary<Op>(operand(out), operand(x), operand(y), operand(z), operand(value)); \
  })                                                                                    \
  OPERATOR(aclnnInplace##Op, (Out x, In y, In z, Number value), {                       \
    return ternary<Op>(operand(x), operand(x), operand(y), operand(z), operand(value)); \
  })
TERNARY(Addcmul)
TERNARY(Addcdiv)

OPERATOR(aclnnRsubs, (In x, Number y, Number alpha, Out out), {
  const Scalar from = operand(y), times = operand(alpha);
  return elementwise(operand(out), [=](auto a) {
    using T = decltype(a);
    return static_cast<T>(from.as<T>() - times.as<T>() * a);
  }, operand(x));
})
OPERATOR(aclnnLerps, (In x, In y, Number weight, Out out),
         { return lerp(operand(out), operand(x), operand(y), operand(weight)); })
OPERATOR(aclnnInplaceLerps, (Out x, In y, Number weight),
         { return lerp(operand(x), operand(x), operand(y), operand(weight)); })
OPERATOR(aclnnPowTensorScalar, (In x, Number exponent, Out out), {
  const double power = operand(exponent).real;
  return elementwise(operand(out), [=](auto a) {
    return static_cast<decltype(a)>(std::pow(static_cast<double>(a), power));
  }, operand(x));
})

UNARY(Sqrt, std::sqrt(x))
UNARY(Neg, -x)
UNARY(Abs, x < 0 ? -x : x)
UNARY(Reciprocal, divide(decltype(x)(1), x))

// ---- comparisons

#define PREDICATE(Name, expression)                                                     \
  OPERATOR(aclnn##Name, (In self, Out out), {                                           \
    return elementwise(operand(out), [](auto x) { return int64_t(expression); }, operand(self)); \
  })
PREDICATE(IsFinite, std::isfinite(static_cast<double>(x)))
PREDICATE(LogicalNot, !x)

#define COMPARISON(Name, op)                                                            \
  OPERATOR(aclnn##Name##Tensor, (In a, In b, Out out), {                                \
    return elementwise(operand(out), [](auto x, auto y) { return int64_t(x op y); },    \
                       operand(a), operand(b));                                         \
  })                                                                                    \
  OPERATOR(aclnn##Name##Scalar, (In a, Number b, Out out), {                            \
    const Scalar y = operand(b);                                                        \
    return elementwise(operand(out), [=](auto x) { return int64_t(x op y.as<decltype(x)>()); }, \
                       operand(a));                                                     \
  })
COMPARISON(Eq, ==)
COMPARISON(Ne, !=)
COMPARISON(Lt, <)
COMPARISON(Le, <=)
COMPARISON(Gt, >)
COMPARISON(Ge, >=)

OPERATOR(aclnnIsClose, (In a, In b, double rtol, double atol, bool equal_nan, Out out), {
  return elementwise(operand(out), [=](auto x, auto y) {
    const double p = static_cast<double>(x), q = static_cast<double>(y);
    if (std::isnan(p) && std::isnan(q)) return int64_t{equal_nan};
    if (p == q) return int64_t{1};
    if (!std::isfinite(p) || !std::isfinite(q)) return int64_t{0};
    return int64_t{std::fabs(p - q) <= atol + rtol * std::fabs(q)};
  }, operand(a), operand(b));
})
OPERATOR(aclnnEqual, (In a, In b, Out out), {
  const Tensor x = operand(a), y = operand(b), to = operand(out);
  return [=] {
    bool equal = x.sizes == y.sizes;
    if (equal) {
      in_working_type({x.dtype, y.dtype}, [&](auto zero) {
        using T = decltype(zero);
        walk(x.sizes, std::array<Ints, 2>{x.strides, y.strides}, [&](const auto& offsets) {
          equal &= load<T>(x.dtype, x.at(offsets[0])) == load<T>(y.dtype, y.at(offsets[1]));
        });
      });
    }
    store(to.dtype, to.data, int64_t{equal});
    return int{kSuccess};
  };
})

// ---- reductions

namespace {

// Fold `in` over `dims` (all, if empty) in double, then `finish(value, count)`.
template <class Fold, class Finish>
Task reduce(Tensor in, const Ints& dims, Tensor out, double start, Fold fold, Finish finish) {
  std::vector<char> gone(in.sizes.size(), dims.empty());
  for (int64_t dim : dims) gone[wrap(dim, in.rank())] = 1;
  Ints places(in.sizes.size(), 0);  // strides into the folded values; 0 where folded
  int64_t count = 1, kept = 1;
  for (int64_t d = in.rank() - 1; d >= 0; --d) {
    if (gone[d]) {
      count *= in.sizes[d];
    } else {
      places[d] = kept;
      kept *= in.sizes[d];
    }
  }
  if (kept != out.count()) refuse("the output does not fit the reduction");
  return [=] {
    std::vector<double> values(kept, start);
    walk(in.sizes, std::array<Ints, 2>{in.strides, places}, [&](const auto& offsets) {
      double& value = values[offsets[1]];
      value = fold(value, load<double>(in.dtype, in.at(offsets[0])));
    });
    size_t i = 0;
    walk(out.sizes, std::array<Ints, 1>{out.strides}, [&](const auto& offsets) {
      store(out.dtype, out.at(offsets[0]), finish(values[i++], static_cast<double>(count)));
    });
    return int{kSuccess};
  };
}

double sum_of(double a, double b) { return a + b; }
double itself(double value, double) { return value; }

}  // namespace

OPERATOR(aclnnReduceSum, (In self, Dims dims, bool, int, Out out), {
  return reduce(operand(self), operand(dims), operand(out), 0, sum_of, itself);
})
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

namespace {

Task product(Tensor a, Tensor b, Tensor out) {
  const int64_t rank = out.rank();
  if (rank < 2 || a.rank() < 2 || b.rank() < 2) refuse("only matrices are simulated");
  const int64_t rows = out.sizes[rank - 2], columns = out.sizes[rank - 1];
  const int64_t depth = a.sizes.back();
  if (a.sizes[a.rank() - 2] != rows || b.sizes[b.rank() - 2] != depth || b.sizes.back() != columns)
    refuse("shapes do not multiply");
  // The batch: the same walk over all three, with the last two dimensions cut off.
  const auto batch = [](Tensor t) {
    t.sizes.resize(t.rank() - 2);
    t.strides.resize(t.sizes.size());
    return t;
  };
  const Tensor many = batch(out);
  const std::array<Ints, 3> strides{many.strides, broadcast(batch(a), many.sizes),
                                    broadcast(batch(b), many.sizes)};
  const auto stride = [](const Tensor& t, int64_t from_end) { return t.strides[t.rank() - from_end]; };
  return [=] {
    walk(many.sizes, strides, [&](const auto& at) {
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
          double sum = 0;
          for (int64_t k = 0; k < depth; ++k)
            sum += load<double>(a.dtype, a.at(at[1] + i * stride(a, 2) + k * stride(a, 1))) *
                   load<double>(b.dtype, b.at(at[2] + k * stride(b, 2) + j * stride(b, 1)));
          store(out.dtype, out.at(at[0] + i * stride(out, 2) + j * stride(out, 1)), sum);
        }
    });
    return int{kSuccess};
  };
}

}  // namespace

OPERATOR(aclnnMm, (In a, In b, Out out, int8_t),
         { return product(operand(a), operand(b), operand(out)); })
OPERATOR(aclnnMatmul, (In a, In b, Out out, int8_t),
         { return product(operand(a), operand(b), operand(out)); })
OPERATOR(aclnnBatchMatMul, (In a, In b, Out out, int8_t),
         { return product(operand(a), operand(b), operand(out)); })

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
    walk(out.sizes, std::array<Ints, 1>{out.strides}, [&](const auto& offsets) {
      store(out.dtype, out.at(offsets[0]), draw(counter++));
    });
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

namespace {

// Outputs and inputs, checked to be of one length.
template <class... More>
size_t same_length(const std::vector<Tensor>& out, const More&... more) {
  if (((more.size() != out.size()) || ...)) refuse("lists of different length");
  return out.size();
}

}  // namespace

OPERATOR(aclnnForeachCopy, (List in, OutList out), {
  const auto to = operand(out), from = operand(in);
  return for_each(same_length(to, from), [&](size_t i) { return copy(to[i], from[i]); });
})
OPERATOR(aclnnForeachZeroInplace, (List self), {
  const auto to = operand(self);
  return for_each(to.size(), [&](size_t i) { return fill(to[i], {0, 0}); });
})
OPERATOR(aclnnForeachSqrt, (List in, OutList out), {
  const auto to = operand(out), from = operand(in);
  return for_each(same_length(to, from), [&](size_t i) {
    return elementwise(to[i], [](auto x) { return static_cast<decltype(x)>(std::sqrt(x)); }, from[i]);
  });
})
OPERATOR(aclnnForeachAddScalarV2, (List in, Number value, OutList out), {
  const auto to = operand(out), from = operand(in);
  const Scalar by = operand(value);
  return for_each(same_length(to, from),
                  [&](size_t i) { return with_alpha<Add>(to[i], from[i], by, {1, 1}); });
})
OPERATOR(aclnnForeachAddListV2, (List in, List other, Number alpha, OutList out), {
  const auto to = operand(out), x = operand(in), y = operand(other);
  const Scalar times = operand(alpha);
  return for_each(same_length(to, x, y),
                  [&](size_t i) { return with_alpha<Add>(to[i], x[i], y[i], times); });
})
#define FOREACH_BINARY(Op)                                                              \
  OPERATOR(aclnnForeach##Op##ScalarV2, (List in, Number value, OutList out), {          \
    const auto to = operand(out), from = operand(in);                                   \
    const Scalar by = operand(value);                                                   \
    return for_each(same_length(to, from),                                              \
                    [&](size_t i) { return binary<Op>(to[i], from[i], by); });          \
  })                                                                                    \
  OPERATOR(aclnnForeach##Op##ScalarList, (List in, Numbers values, OutList out), {      \
    const auto to = operand(out), from = operand(in);                                   \
    const auto by = operand(values);                                                    \
    return for_each(same_length(to, from, by),                                          \
                    [&](size_t i) { return binary<Op>(to[i], from[i], by[i]); });       \
  })                                                                                    \
  OPERATOR(aclnnForeach##Op##List, (List in, List other, OutList out), {                \
    const auto to = operand(out), x = operand(in), y = operand(other);                  \
    return for_each(same_length(to, x, y),                                              \
                    [&](size_t i) { return binary<Op>(to[i], x[i], y[i]); });           \
  })
FOREACH_BINARY(Mul)
FOREACH_BINARY(Div)

// The weight is a scalar here, unlike in other list operators without V2.
OPERATOR(aclnnForeachLerpScalar, (List in, List end, Number weight, OutList out), {
  const auto to = operand(out), x = operand(in), y = operand(end);
  const Scalar by = operand(weight);
  return for_each(same_length(to, x, y), [&](size_t i) { return lerp(to[i], x[i], y[i], by); });
})
#define FOREACH_TERNARY(Op)                                                             \
  OPERATOR(aclnnForeach##Op##ScalarV2, (List in, List a, List b, Number value, OutList out), { \
    const auto to = operand(out), x = operand(in), y = operand(a), z = operand(b);      \
    const Scalar by = operand(value);                                                   \
    return for_each(same_length(to, x, y, z),                                           \
                    [&](size_t i) { return ternary<Op>(to[i], x[i], y[i], z[i], by); }); \
  })                                                                                    \
  OPERATOR(aclnnForeach##Op##ScalarList, (List in, List a, List b, In values, OutList out), { \
    const auto to = operand(out), x = operand(in), y = operand(a), z = operand(b);      \
    const Tensor by = operand(values); /* one number for each item, on the device */    \
    const size_t n = same_length(to, x, y, z);                                          \
    if (by.count() != static_cast<int64_t>(n)) refuse("one value for each item");       \
    return [=] {                                                                        \
      for (size_t i = 0; i < n; ++i) {                                                  \
        const double value = load<double>(by.dtype, by.at(static_cast<int64_t>(i)));    \
        const Scalar scalar{value, static_cast<int64_t>(value)};                        \
        if (int code = ternary<Op>(to[i], x[i], y[i], z[i], scalar)()) return code;     \
      }                                                                                 \
      return int{kSuccess};                                                             \
    };                                                                                  \
  })
FOREACH_TERNARY(Addcmul)
FOREACH_TERNARY(Addcdiv)

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
    const double t = load<double>(steps.dtype, steps.data) + 1;
    const float correction1 = static_cast<float>(1 - std::pow(double{beta1}, t));
    const float correction2 = static_cast<float>(std::sqrt(1 - std::pow(double{beta2}, t)));
    walk(p.sizes, strides, [&](const auto& at) {
      const float raw = load<float>(g.dtype, g.at(at[3])), gradient = maximize ? -raw : raw;
      const float mean = interpolate(load<float>(m.dtype, m.at(at[1])), gradient, 1 - beta1);
      const float square =
          beta2 * load<float>(v.dtype, v.at(at[2])) + (1 - beta2) * gradient * gradient;
      const float decayed = load<float>(p.dtype, p.at(at[0])) * (1 - lr * decay);
      const float update = lr / correction1 * mean / (std::sqrt(square) / correction2 + eps);
      store(p.dtype, p.at(at[0]), decayed - update);
      store(m.dtype, m.at(at[1]), mean);
      store(v.dtype, v.at(at[2]), square);
    });
    return int{kSuccess};
  };
})
