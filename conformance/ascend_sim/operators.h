// How an operator is defined: its two phases, the names of its arguments, and what several
// operators are made of.
//
// torch_npu calls an operator in two phases: aclnnXGetWorkspaceSize plans, aclnnX launches. Here the
// first checks every argument and makes the task; the second submits it to the stream.
#pragma once

#include <tuple>

#include "tensors.h"

namespace sim {

using In = const aclTensor*;
using Out = aclTensor*;
using Number = const aclScalar*;
using List = const aclTensorList*;
using OutList = aclTensorList*;
using Numbers = const aclScalarList*;
using Dims = const aclIntArray*;

template <class Make>
int plan(const char* name, uint64_t* workspace, aclOpExecutor** executor, Make make) {
  *workspace = 0;
  *executor = nullptr;
  ENTER(name);
  try {
    *executor = new aclOpExecutor{make()};
    return kSuccess;
  } catch (const Refused& refused) {
    return fail(kAclnnParam, "%s: %s", name, refused.why.c_str());
  }
}

// torch_npu may ignore the result of the first phase; then there is no executor.
inline int launch(const char* name, aclOpExecutor* executor, void* stream) {
  if (!executor) return fail(kAclnnNull, "%s: launched without a plan", name);
  Task task = std::move(executor->task);
  delete executor;
  return submit(stream, std::move(task));
}

Task copy(Tensor out, Tensor in);  // casts, broadcasts and follows strides
Task fill(Tensor out, Scalar value);
// The part of `t` from `start` along `dim`, `length` long.
Tensor narrow(Tensor t, int64_t dim, int64_t start, int64_t length);
// `t` with a dimension of `size` before `dim` along which nothing changes.
Tensor repeated(Tensor t, int64_t dim, int64_t size);
// `in` folded in double over `dims` (all, if empty), then `finish(value, count)`.
Task reduce(Tensor in, const Ints& dims, Tensor out, double start, double (*fold)(double, double),
            double (*finish)(double, double));
inline double sum_of(double a, double b) { return a + b; }
inline double itself(double value, double) { return value; }

// out = f(args...), elementwise; arguments are tensors and scalars.
template <class F, class... Args>
Task pointwise(In out, F f, const Args*... args) {
  return elementwise(operand(out), f, operand(args)...);
}

// The same for each position of lists; a scalar is the same at all positions.
inline Tensor pick(const std::vector<Tensor>& list, size_t i) { return list[i]; }
inline Scalar pick(const std::vector<Scalar>& list, size_t i) { return list[i]; }
inline Scalar pick(const Scalar& number, size_t) { return number; }
template <class T>
size_t length(const std::vector<T>& list, size_t) { return list.size(); }
inline size_t length(const Scalar&, size_t otherwise) { return otherwise; }

template <class F, class... Args>
Task foreach(OutList outs, F f, const Args*... args) {
  const std::vector<Tensor> to = operand(static_cast<List>(outs));
  const std::tuple ins{operand(args)...};
  std::vector<Task> tasks;
  std::apply([&](const auto&... in) {
    if (((length(in, to.size()) != to.size()) || ...)) refuse("lists of different length");
    for (size_t i = 0; i < to.size(); ++i) tasks.push_back(elementwise(to[i], f, pick(in, i)...));
  }, ins);
  return in_turn(std::move(tasks));
}

// Functors that several operators share.
template <class T>
T divide(T a, T b) {
  if constexpr (std::is_integral_v<T>) return b ? a / b : 0;
  else return a / b;
}
constexpr auto kAdd = [](auto x, auto y, auto alpha) { return x + alpha * y; };
constexpr auto kSub = [](auto x, auto y, auto alpha) { return x - alpha * y; };
constexpr auto kMul = [](auto x, auto y) { return x * y; };
constexpr auto kDiv = [](auto x, auto y) { return divide(x, y); };
constexpr auto kAddcmul = [](auto x, auto y, auto z, auto value) { return x + value * y * z; };
constexpr auto kAddcdiv = [](auto x, auto y, auto z, auto value) { return x + value * divide(y, z); };
constexpr auto kLerp = [](auto a, auto b, auto weight) {
  return std::fabs(static_cast<double>(weight)) < 0.5 ? a + weight * (b - a)
                                                      : b - (b - a) * (1 - weight);
};

}  // namespace sim

// Defines both phases; the last argument is a body that returns the task.
#define OPERATOR(name, params, ...)                                                     \
  API int name##GetWorkspaceSize(UNPACKED params, uint64_t* workspace_out,              \
                                 aclOpExecutor** executor_out) {                        \
    return plan(#name, workspace_out, executor_out, [&]() -> Task __VA_ARGS__);         \
  }                                                                                     \
  API int name(void*, uint64_t, aclOpExecutor* executor, void* stream) {                \
    return launch(#name, executor, stream);                                             \
  }
#define UNPACKED(...) __VA_ARGS__

// out = f(x), elementwise; `x` in the expression is a value in the working type.
#define UNARY(Name, expression) \
  OPERATOR(aclnn##Name, (In self, Out out), { \
    return pointwise(out, [](auto x) { return expression; }, self); \
  })
// out = f(x, ...), and the same in place.
#define BOTH_FORMS(Name, params, f, ...) \
  OPERATOR(aclnn##Name, (In x, UNPACKED params, Out out), { \
    return pointwise(out, f, x, __VA_ARGS__); \
  }) \
  OPERATOR(aclnnInplace##Name, (Out x, UNPACKED params), { \
    return pointwise(x, f, x, __VA_ARGS__); \
  })
