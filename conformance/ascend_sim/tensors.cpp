// Making, checking and destroying the containers of tensors.h.
#include "tensors.h"

#include <mutex>
#include <unordered_map>

namespace sim {
namespace {

enum class Kind { kTensor, kScalar, kIntArray, kBoolArray, kFloatArray, kTensorList, kScalarList };

struct Registry {
  std::mutex lock;
  std::unordered_map<const void*, Kind> live;
};

Registry& registry() {
  static Registry* r = new Registry;
  return *r;
}

template <class T>
T* registered(T* made, Kind kind) {
  std::lock_guard<std::mutex> guard(registry().lock);
  registry().live[made] = kind;
  return made;
}

template <class T>
int destroy(const T* item) {
  {
    std::lock_guard<std::mutex> guard(registry().lock);
    registry().live.erase(item);
  }
  delete item;
  return kSuccess;
}

void check(const void* pointer, Kind kind, const char* name) {
  if (!pointer) refuse(std::string("null ") + name);
  std::lock_guard<std::mutex> guard(registry().lock);
  auto it = registry().live.find(pointer);
  if (it == registry().live.end() || it->second != kind)
    refuse(std::string("an argument is not an ") + name + ": the signature differs");
}

}  // namespace

Tensor operand(const aclTensor* t) {
  check(t, Kind::kTensor, "aclTensor");
  const size_t step = size_of(t->dtype);
  if (!step) refuse("data type " + std::to_string(t->dtype) + " is not simulated");
  Tensor out{t->sizes, t->strides, t->dtype, nullptr};
  if (out.count() == 0) return out;
  if (!t->storage)
    refuse("a tensor of " + std::to_string(out.count()) + " elements has null device storage");
  int64_t last = t->offset;
  for (size_t d = 0; d < t->sizes.size(); ++d) last += (t->sizes[d] - 1) * t->strides[d];
  if (t->offset < 0 || !inside_allocation(t->storage, static_cast<size_t>(last + 1) * step))
    refuse("a tensor does not lie in device memory, or reaches beyond its allocation");
  out.data = view(t->storage) + t->offset * static_cast<int64_t>(step);
  return out;
}

Scalar operand(const aclScalar* s) {
  check(s, Kind::kScalar, "aclScalar");
  if (!size_of(s->dtype)) refuse("scalar type " + std::to_string(s->dtype) + " is not simulated");
  return {s->real, s->whole};
}

Ints operand(const aclIntArray* array) {
  if (!array) return {};
  check(array, Kind::kIntArray, "aclIntArray");
  return array->values;
}

std::vector<Tensor> operand(const aclTensorList* list) {
  check(list, Kind::kTensorList, "aclTensorList");
  std::vector<Tensor> out;
  for (const aclTensor* item : list->items) out.push_back(operand(item));
  return out;
}

std::vector<Scalar> operand(const aclScalarList* list) {
  check(list, Kind::kScalarList, "aclScalarList");
  std::vector<Scalar> out;
  for (const aclScalar* item : list->items) out.push_back(operand(item));
  return out;
}

}  // namespace sim

using namespace sim;

API aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t rank, int dtype,
                               const int64_t* strides, int64_t offset, int, const int64_t*,
                               uint64_t, void* storage) {
  return registered(new aclTensor{Ints(sizes, sizes + rank), Ints(strides, strides + rank), offset,
                                  dtype, storage},
                    Kind::kTensor);
}
API aclScalar* aclCreateScalar(void* value, int dtype) {
  const char* at = static_cast<const char*>(value);
  aclScalar* made = new aclScalar{dtype, load<double>(dtype, at), 0};
  made->whole = is_floating(dtype) ? static_cast<int64_t>(made->real) : load<int64_t>(dtype, at);
  return registered(made, Kind::kScalar);
}
API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return registered(new aclIntArray{Ints(values, values + count)}, Kind::kIntArray);
}
API aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t count) {
  return registered(new aclBoolArray{{values, values + count}}, Kind::kBoolArray);
}
API aclFloatArray* aclCreateFloatArray(const float* values, uint64_t count) {
  return registered(new aclFloatArray{{values, values + count}}, Kind::kFloatArray);
}
API aclTensorList* aclCreateTensorList(const aclTensor* const* items, uint64_t count) {
  return registered(new aclTensorList{{items, items + count}}, Kind::kTensorList);
}
API aclScalarList* aclCreateScalarList(const aclScalar* const* items, uint64_t count) {
  return registered(new aclScalarList{{items, items + count}}, Kind::kScalarList);
}
API int aclDestroyTensor(const aclTensor* item) { return destroy(item); }
API int aclDestroyScalar(const aclScalar* item) { return destroy(item); }
API int aclDestroyIntArray(const aclIntArray* item) { return destroy(item); }
API int aclDestroyBoolArray(const aclBoolArray* item) { return destroy(item); }
API int aclDestroyFloatArray(const aclFloatArray* item) { return destroy(item); }
// A list owns its elements.
API int aclDestroyTensorList(const aclTensorList* list) {
  if (list)
    for (const aclTensor* item : list->items) destroy(item);
  return destroy(list);
}
API int aclDestroyScalarList(const aclScalarList* list) {
  if (list)
    for (const aclScalar* item : list->items) destroy(item);
  return destroy(list);
}
API int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  delete executor;
  return kSuccess;
}
