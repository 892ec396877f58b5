// The containers that torch_npu hands to an operator, and how operators walk over elements.
//
// Every container is registered, so that an argument of the wrong kind - a signature that differs
// from torch_npu's - is refused by name instead of being read as something that it is not.
#pragma once

#include <array>
#include <string>
#include <type_traits>
#include <vector>

#include "numbers.h"
#include "sim.h"

using Ints = std::vector<int64_t>;

struct Container {
  Container();
  virtual ~Container();
};
struct aclTensor : Container {
  Ints sizes, strides;
  int64_t offset;  // in elements
  int dtype;
  void* storage;
};
struct aclScalar : Container {
  int dtype;
  double real;
  int64_t whole;
};
template <class T>
struct Items : Container {
  std::vector<T> values;
};
struct aclIntArray : Items<int64_t> {};
struct aclTensorList : Items<const aclTensor*> {};
struct aclScalarList : Items<const aclScalar*> {};
struct aclOpExecutor { sim::Task task; };

namespace sim {

// Thrown while an operator is planned; becomes the error of its first phase.
struct Refused {
  std::string why;
};
[[noreturn]] inline void refuse(const std::string& why) { throw Refused{why}; }

inline int64_t count_of(const Ints& sizes) {
  int64_t n = 1;
  for (int64_t size : sizes) n *= size;
  return n;
}

// ---- operands: what a task keeps, with addresses in the simulator's own mapping

struct Tensor {
  Ints sizes, strides;
  int dtype;
  char* data;  // of the first element

  int64_t rank() const { return static_cast<int64_t>(sizes.size()); }
  int64_t count() const { return count_of(sizes); }
  size_t step() const { return size_of(dtype); }
  char* at(int64_t elements) const { return data + elements * static_cast<int64_t>(step()); }
  bool dense() const {
    int64_t expected = 1;
    for (int64_t d = rank() - 1; d >= 0; --d) {
      if (sizes[d] != 1 && strides[d] != expected) return false;
      expected *= sizes[d];
    }
    return true;
  }
};

struct Scalar {
  double real;
  int64_t whole;
};

Tensor operand(const aclTensor* tensor);
Scalar operand(const aclScalar* scalar);
Ints operand(const aclIntArray* array);  // empty for a null pointer
std::vector<Tensor> operand(const aclTensorList* list);
std::vector<Scalar> operand(const aclScalarList* list);

// What an elementwise operator reads: a tensor, or a scalar that is the same everywhere.
inline int dtype_of(const Tensor& t) { return t.dtype; }
inline int dtype_of(const Scalar&) { return kBool; }  // the tensors decide the working type
template <class T>
T read(const Tensor& t, int64_t offset) { return load<T>(t.dtype, t.at(offset)); }
template <class T>
T read(const Scalar& s, int64_t) {
  return std::is_integral_v<T> ? static_cast<T>(s.whole) : static_cast<T>(s.real);
}

// `dim` counted from the front.
inline int64_t wrap(int64_t dim, int64_t rank) {
  if (dim < -rank || dim >= rank) refuse("dimension " + std::to_string(dim) + " out of range");
  return dim < 0 ? dim + rank : dim;
}

// Strides of an operand seen with `sizes`, 0 where it is broadcast.
inline Ints broadcast(const Scalar&, const Ints& sizes) { return Ints(sizes.size(), 0); }
inline Ints broadcast(const Tensor& t, const Ints& sizes) {
  const int64_t extra = static_cast<int64_t>(sizes.size()) - t.rank();
  if (extra < 0) refuse("an input has more dimensions than the output");
  Ints strides(sizes.size(), 0);
  for (int64_t d = 0; d < t.rank(); ++d) {
    if (t.sizes[d] == 1) continue;
    if (t.sizes[d] != sizes[d + extra]) refuse("shapes do not broadcast");
    strides[d + extra] = t.strides[d];
  }
  return strides;
}

// Call `visit(offsets)` for each index of `sizes`, in row-major order; offsets are in elements.
template <size_t N, class Visit>
void walk(const Ints& sizes, const std::array<Ints, N>& strides, Visit visit) {
  const int64_t total = count_of(sizes);
  Ints index(sizes.size(), 0);
  std::array<int64_t, N> offsets{};
  for (int64_t k = 0; k < total; ++k) {
    visit(offsets);
    for (int64_t d = static_cast<int64_t>(sizes.size()) - 1; d >= 0; --d) {
      const bool carry = ++index[d] == sizes[d];
      const int64_t steps = carry ? 1 - sizes[d] : 1;
      for (size_t n = 0; n < N; ++n) offsets[n] += steps * strides[n][d];
      if (!carry) break;
      index[d] = 0;
    }
  }
}

// `body` gets a value of the type arithmetic is done in: double if any operand is double, float if
// any is floating, else int64.
template <class Body>
void in_working_type(std::initializer_list<int> dtypes, Body body) {
  bool any_double = false, any_floating = false;
  for (int dtype : dtypes) {
    any_double |= dtype == kDouble;
    any_floating |= is_floating(dtype);
  }
  if (any_double) return body(double());
  if (any_floating) return body(float());
  body(int64_t());
}

// out = f(inputs...), elementwise, with broadcasting. Shapes are checked when this is called, the
// arithmetic runs when the task does. `f` may return any number: storing converts it.
template <class F, class... In>
Task elementwise(Tensor out, F f, In... in) {
  std::array<Ints, 1 + sizeof...(In)> strides{out.strides, broadcast(in, out.sizes)...};
  return [=] {
    in_working_type({out.dtype, dtype_of(in)...}, [&](auto zero) {
      using T = decltype(zero);
      walk(out.sizes, strides, [&](const auto& offsets) {
        size_t n = 0;
        // Braces: evaluated left to right.
        const std::array<T, sizeof...(In)> values{read<T>(in, offsets[++n])...};
        store(out.dtype, out.at(offsets[0]), std::apply(f, values));
      });
    });
    return int{kSuccess};
  };
}

// One task after the other.
inline Task in_turn(std::vector<Task> tasks) {
  return [tasks = std::move(tasks)] {
    for (const Task& task : tasks)
      if (int code = task()) return code;
    return int{kSuccess};
  };
}

}  // namespace sim
