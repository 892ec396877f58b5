// What torch_npu hands to an operator: values that it makes with aclCreate*, passes by handle, and
// destroys. Each is a value of torch that knows its kind, and no handle is ever followed, so that
// an argument of the wrong kind - a signature that differs from torch_npu's - is refused by name
// and never read as what it is not.
//
// A tensor of the device is seen through the simulator's own mapping as a CPU tensor of torch.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/jit_type.h>

#include "sim.h"

namespace sim {

struct Value;  // only ever a handle

// None for a null handle; fails if there is no such value.
c10::IValue value_of(const Value* handle);
void replace(const Value* handle, c10::IValue value);

using Ints = std::vector<int64_t>;

// An argument in C is a pointer; a class of one pointer is passed in the same way.
template <class T>
struct Argument {
  const Value* handle;
};
using In = Argument<at::Tensor>;
using Out = In;
using Number = Argument<at::Scalar>;
using Dims = Argument<Ints>;
using List = Argument<std::vector<at::Tensor>>;
using Numbers = Argument<std::vector<at::Scalar>>;
template <class T>
using Maybe = Argument<std::optional<T>>;  // may be null

template <class T>
T resolved(Argument<T> argument) {
  const c10::IValue value = value_of(argument.handle);
  try {
    return value.to<T>();
  } catch (const c10::Error&) {
    fail(kAclnnParam, "an argument is not an acl%s but %s: the signature differs",
         c10::getTypePtr<T>()->str().c_str(), value.tagKind().c_str());
  }
}
template <class T>
T resolved(T plain) { return plain; }

template <class T>
int64_t elements(const T&) { return 0; }
inline int64_t elements(const at::Tensor& tensor) { return tensor.numel(); }

// A task that calls `f` with the arguments as they are now.
template <class F, class... Args>
Task later(F f, Args... args) {
  return [f, values = std::make_tuple(resolved(args)...)]() mutable {
    const auto sum = [](const auto&... each) { return (elements(each) + ... + 0); };
    const int64_t before = std::apply(sum, values);
    std::apply(f, values);
    // torch cuts an output that is too long down to the result, and warns; the device's would keep
    // what lay there.
    if (std::apply(sum, values) != before) fail(kAclnnParam, "the output does not fit the result");
  };
}

}  // namespace sim
