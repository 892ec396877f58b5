// How an operator is defined: its two phases, the names of its arguments, and the copy that most
// operators of layout are made of.
//
// torch_npu calls an operator in two phases: aclnnXGetWorkspaceSize plans, aclnnX launches. Here the
// first checks every argument and makes the task; the second submits it to the stream.
#pragma once

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
    return fail(refused.code, "%s: %s", name, refused.why.c_str());
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

// Elementwise on one tensor: `x` in the expression is its value, in the working type.
#define UNARY(Name, expression)                                                         \
  OPERATOR(aclnn##Name, (In self, Out out), {                                           \
    return elementwise(operand(out), [](auto x) { return static_cast<decltype(x)>(expression); }, \
                       operand(self));                                                  \
  })                                                                                    \
  OPERATOR(aclnnInplace##Name, (Out self), {                                            \
    return elementwise(operand(self), [](auto x) { return static_cast<decltype(x)>(expression); }, \
                       operand(self));                                                  \
  })
