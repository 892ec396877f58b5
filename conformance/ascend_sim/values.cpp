// Making, finding and destroying the values of values.h.
#include "values.h"

#include <ATen/EmptyTensor.h>

namespace sim {
namespace {

// By ACL's own codes.
const std::map<int, at::ScalarType> kTypes = {
    {0, at::kFloat},   {1, at::kHalf},    {2, at::kChar},    {3, at::kInt},  {4, at::kByte},
    {6, at::kShort},   {7, at::kUInt16},  {8, at::kUInt32},  {9, at::kLong}, {10, at::kUInt64},
    {11, at::kDouble}, {12, at::kBool},   {27, at::kBFloat16}};

std::mutex lock;  // for what follows
std::map<const Value*, c10::IValue>& living = *new std::map<const Value*, c10::IValue>;
uintptr_t last = uintptr_t{0x5EED} << 32;  // no handle is used twice, or looks like a number

// A value that could not be made is the reason, for the operator that gets it.
const Value* made(const std::function<c10::IValue()>& make) {
  c10::IValue value;
  const Failure failure = attempt("aclCreate", [&] { value = make(); });
  if (failure.code) value = failure.text;
  std::lock_guard guard(lock);
  const auto* handle = reinterpret_cast<const Value*>(++last);
  living.emplace(handle, std::move(value));
  return handle;
}

at::ScalarType type_of(int code) {
  const auto type = kTypes.find(code);
  if (type == kTypes.end()) fail(kAclnnParam, "data type %d is not simulated", code);
  return type->second;
}

at::Tensor tensor(at::IntArrayRef sizes, at::IntArrayRef strides, int dtype, const char* storage,
                  int64_t offset) {
  const at::ScalarType type = type_of(dtype);
  const size_t step = c10::elementSize(type);
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, step);
  if (bytes && !storage) fail(kAclnnParam, "a tensor of %zu bytes has null storage", bytes);
  char* data = bytes ? view(storage + offset * static_cast<int64_t>(step), bytes) : nullptr;
  if (bytes && !data) fail(kAclnnParam, "a tensor reaches beyond an allocation of device memory");
  return at::from_blob(data, sizes, strides, type);
}

}  // namespace

c10::IValue value_of(const Value* handle) {
  if (!handle) return {};
  std::lock_guard guard(lock);
  const auto found = living.find(handle);
  if (found == living.end())
    fail(kAclnnParam, "an argument is not an acl value at all: the signature differs");
  if (found->second.isString()) fail(kAclnnParam, "%s", found->second.toStringRef().c_str());
  return found->second;
}

void replace(const Value* handle, c10::IValue value) {
  std::lock_guard guard(lock);
  living.at(handle) = std::move(value);
}

}  // namespace sim

using namespace sim;

API const Value* aclCreateTensor(const int64_t* sizes, uint64_t rank, int dtype,
                                 const int64_t* strides, int64_t offset, int, const int64_t*,
                                 uint64_t, const char* storage) {
  return made([&] { return tensor({sizes, rank}, {strides, rank}, dtype, storage, offset); });
}
API const Value* aclCreateScalar(void* number, int dtype) {
  return made([&] { return at::from_blob(number, {}, type_of(dtype)).item(); });
}
API const Value* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return made([&] { return Ints(values, values + count); });
}

API int aclDestroyTensor(const Value* handle) {
  std::lock_guard guard(lock);
  living.erase(handle);
  return kSuccess;
}
ALIAS(aclDestroyScalar, aclDestroyTensor)
ALIAS(aclDestroyIntArray, aclDestroyTensor)
ALIAS(aclDestroyTensorList, aclDestroyTensor)
ALIAS(aclDestroyScalarList, aclDestroyTensor)

// A list owns its items, so nobody asks for them afterwards.
template <class T>
c10::List<T> taken(const Value* const* items, uint64_t count) {
  c10::List<T> list;
  for (uint64_t i = 0; i < count; ++i) {
    list.push_back(resolved(Argument<T>{items[i]}));
    aclDestroyTensor(items[i]);
  }
  return list;
}
API const Value* aclCreateTensorList(const Value* const* items, uint64_t count) {
  return made([&] { return taken<at::Tensor>(items, count); });
}
API const Value* aclCreateScalarList(const Value* const* items, uint64_t count) {
  return made([&] { return taken<at::Scalar>(items, count); });
}

// The shape that an operator with an output of unknown length has given it (nonzero).
ENTRY(aclGetViewShape, (const Value* handle, int64_t** sizes, uint64_t* rank), {
  const at::Tensor tensor = resolved(In{handle});
  *rank = tensor.dim();
  *sizes = new int64_t[*rank];  // the caller deletes it
  std::copy_n(tensor.sizes().begin(), *rank, *sizes);
})
