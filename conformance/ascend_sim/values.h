// What torch_npu hands to an operator: values that it makes with aclCreate*, passes by address, and
// destroys. Living values are registered with their kind, so that an argument of the wrong kind - a
// signature that differs from torch_npu's - is refused by name and never read as what it is not.
//
// A tensor of the device is seen through the simulator's own mapping as a CPU tensor of torch.
#pragma once

#include <ATen/Tensor.h>

#include <optional>
#include <tuple>
#include <variant>
#include <vector>

#include "sim.h"

namespace sim {

using Ints = std::vector<int64_t>;

struct Layout {
  Ints sizes, strides;
  int dtype;      // a code of ACL
  char* storage;  // as torch knows it
  int64_t offset;
};
struct Value {
  std::variant<Layout, at::Scalar, Ints, std::vector<Value*>> held;
};

// The value as T; fails if it is something else.
void read(Value* value, at::Tensor& out);
void read(Value* value, at::Scalar& out);
void read(Value* value, Ints& out);  // empty for a null pointer
template <class T>
void read(Value* value, std::optional<T>& out) {  // none for a null pointer
  if (value) read(value, out.emplace());
}
const std::vector<Value*>& items_of(Value* list);
template <class T>
void read(Value* list, std::vector<T>& out) {
  for (Value* item : items_of(list)) read(item, out.emplace_back());
}

// An argument in C is a pointer; a class of one pointer is passed in the same way.
template <class T>
struct Argument {
  Value* value;
};
using In = Argument<at::Tensor>;
using Out = In;
using Number = Argument<at::Scalar>;
using Dims = Argument<Ints>;
using List = Argument<std::vector<at::Tensor>>;
using Numbers = Argument<std::vector<at::Scalar>>;
template <class T>
using Maybe = Argument<std::optional<T>>;

template <class T>
T resolved(Argument<T> argument) {
  T out;
  read(argument.value, out);
  return out;
}
template <class T>
T resolved(T plain) { return plain; }

template <class T>
int64_t elements(const T&) { return 0; }
inline int64_t elements(const at::Tensor& tensor) { return tensor.numel(); }

// A task that calls `f` with the arguments as they are now; what torch refuses fails in its words.
template <class F, class... Args>
Task later(F f, Args... args) {
  return [f, values = std::make_tuple(resolved(args)...)]() mutable {
    const auto sum = [](const auto&... each) { return (elements(each) + ... + 0); };
    const int64_t before = std::apply(sum, values);
    try {
      std::apply(f, values);
    } catch (const c10::Error& error) {
      fail(kAclnnParam, "%s", error.what_without_backtrace());
    }
    // torch cuts an output that is too long down to the result, and warns; the device's would keep
    // what lay there.
    if (std::apply(sum, values) != before) fail(kAclnnParam, "the output does not fit the result");
  };
}

// The type behind a code of ACL; Undefined where it is not simulated.
at::ScalarType type_of(int acl_dtype);

}  // namespace sim
