// Making, checking and destroying the values of values.h.
#include "values.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>

namespace sim {
namespace {

struct Registry {
  std::mutex lock;
  std::unordered_set<Value*> live;
};

Registry& registry() {
  static Registry* r = new Registry;
  return *r;
}

Value* made(Value value) {
  Value* v = new Value(std::move(value));
  std::lock_guard guard(registry().lock);
  registry().live.insert(v);
  return v;
}

template <class T>
const T& checked(Value* value, const char* kind) {
  if (!value) fail(kAclnnParam, "null %s", kind);
  std::lock_guard guard(registry().lock);
  if (!registry().live.count(value) || !std::holds_alternative<T>(value->held))
    fail(kAclnnParam, "an argument is not an %s: the signature differs", kind);
  return std::get<T>(value->held);
}

}  // namespace

at::ScalarType type_of(int acl_dtype) {
  switch (acl_dtype) {
    case 0: return at::kFloat;
    case 1: return at::kHalf;
    case 2: return at::kChar;
    case 3: return at::kInt;
    case 4: return at::kByte;
    case 6: return at::kShort;
    case 7: return at::kUInt16;
    case 8: return at::kUInt32;
    case 9: return at::kLong;
    case 10: return at::kUInt64;
    case 11: return at::kDouble;
    case 12: return at::kBool;
    case 27: return at::kBFloat16;
  }
  fail(kAclnnParam, "data type %d is not simulated", acl_dtype);
}

void read(Value* value, at::Tensor& out) {
  const Layout& t = checked<Layout>(value, "aclTensor");
  const at::ScalarType type = type_of(t.dtype);
  const size_t step = c10::elementSize(type);
  const size_t bytes = at::detail::computeStorageNbytes(t.sizes, t.strides, step);
  char* data = nullptr;
  if (bytes && !t.storage) fail(kAclnnParam, "a tensor of %zu bytes has null storage", bytes);
  if (bytes) data = view(t.storage + t.offset * static_cast<int64_t>(step), bytes);
  if (bytes && !data) fail(kAclnnParam, "a tensor reaches beyond an allocation of device memory");
  out = at::from_blob(data, t.sizes, t.strides, type);
}
void read(Value* value, at::Scalar& out) { out = checked<at::Scalar>(value, "aclScalar"); }
void read(Value* value, Ints& out) {
  if (value) out = checked<Ints>(value, "aclIntArray");
}
const std::vector<Value*>& items_of(Value* list) {
  return checked<std::vector<Value*>>(list, "aclTensorList or aclScalarList");
}

}  // namespace sim

using namespace sim;

API Value* aclCreateTensor(const int64_t* sizes, uint64_t rank, int dtype, const int64_t* strides,
                           int64_t offset, int, const int64_t*, uint64_t, char* storage) {
  return made({Layout{{sizes, sizes + rank}, {strides, strides + rank}, dtype, storage, offset}});
}
// Of a type that is not simulated it is null, which an operator refuses.
API Value* aclCreateScalar(void* number, int dtype) {
  Value* value = nullptr;
  guarded("aclCreateScalar", [&] {
    value = made({at::from_blob(number, {}, type_of(dtype)).item()});
  });
  return value;
}
API Value* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return made({Ints(values, values + count)});
}
API Value* aclCreateTensorList(Value* const* items, uint64_t count) {
  return made({std::vector<Value*>(items, items + count)});
}
ALIAS(aclCreateScalarList, aclCreateTensorList)

// A list owns its items.
API int aclDestroyTensorList(Value* value) {
  if (!value) return kSuccess;
  if (const auto* items = std::get_if<std::vector<Value*>>(&value->held))
    std::for_each(items->begin(), items->end(), aclDestroyTensorList);
  std::lock_guard guard(registry().lock);
  registry().live.erase(value);
  delete value;
  return kSuccess;
}
ALIAS(aclDestroyScalarList, aclDestroyTensorList)
ALIAS(aclDestroyTensor, aclDestroyTensorList)
ALIAS(aclDestroyScalar, aclDestroyTensorList)
ALIAS(aclDestroyIntArray, aclDestroyTensorList)

// The shape that an operator with an output of unknown length has given it (nonzero).
API int aclGetViewShape(Value* tensor, int64_t** sizes, uint64_t* rank) {
  const Ints& shape = std::get<Layout>(tensor->held).sizes;
  *rank = shape.size();
  *sizes = new int64_t[*rank];  // the caller deletes it
  std::copy(shape.begin(), shape.end(), *sizes);
  return kSuccess;
}
