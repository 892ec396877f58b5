// Making, checking and destroying the containers of tensors.h.
#include "tensors.h"

#include <algorithm>
#include <mutex>
#include <unordered_set>

namespace {

struct Registry {
  std::mutex lock;
  std::unordered_set<const void*> live;
};

Registry& registry() {
  static Registry* r = new Registry;
  return *r;
}

}  // namespace

Container::Container() {
  std::lock_guard<std::mutex> guard(registry().lock);
  registry().live.insert(this);
}
Container::~Container() {
  std::lock_guard<std::mutex> guard(registry().lock);
  registry().live.erase(this);
}

namespace sim {
namespace {

template <class T>
const T& checked(const T* pointer, const char* name) {
  if (!pointer) refuse(std::string("null ") + name);
  std::lock_guard<std::mutex> guard(registry().lock);
  const void* raw = pointer;
  if (!registry().live.count(raw) || !dynamic_cast<const T*>(static_cast<const Container*>(raw)))
    refuse(std::string("an argument is not an ") + name + ": the signature differs");
  return *pointer;
}

template <class List>
auto operands(const List& list) {
  std::vector<decltype(operand(list.values[0]))> out;
  for (const auto* item : list.values) out.push_back(operand(item));
  return out;
}

}  // namespace

Tensor operand(const aclTensor* tensor) {
  const aclTensor& t = checked(tensor, "aclTensor");
  const size_t step = size_of(t.dtype);
  if (!step) refuse("data type " + std::to_string(t.dtype) + " is not simulated");
  Tensor out{t.sizes, t.strides, t.dtype, nullptr};
  if (out.count() == 0) return out;
  if (!t.storage)
    refuse("a tensor of " + std::to_string(out.count()) + " elements has null device storage");
  int64_t last = t.offset;
  for (size_t d = 0; d < t.sizes.size(); ++d) last += (t.sizes[d] - 1) * t.strides[d];
  if (t.offset < 0 || !inside_allocation(t.storage, static_cast<size_t>(last + 1) * step))
    refuse("a tensor does not lie in device memory, or reaches beyond its allocation");
  out.data = view(t.storage) + t.offset * static_cast<int64_t>(step);
  return out;
}

Scalar operand(const aclScalar* scalar) {
  const aclScalar& s = checked(scalar, "aclScalar");
  if (!size_of(s.dtype)) refuse("scalar type " + std::to_string(s.dtype) + " is not simulated");
  return {s.real, s.whole};
}

Ints operand(const aclIntArray* array) {
  return array ? checked(array, "aclIntArray").values : Ints{};
}
std::vector<Tensor> operand(const aclTensorList* list) {
  return operands(checked(list, "aclTensorList"));
}
std::vector<Scalar> operand(const aclScalarList* list) {
  return operands(checked(list, "aclScalarList"));
}

}  // namespace sim

using namespace sim;

namespace {

template <class Made, class T>
Made* list_of(const T* values, uint64_t count) {
  Made* made = new Made;
  made->values.assign(values, values + count);
  return made;
}

int destroy(const Container* item) {
  delete item;
  return kSuccess;
}

// A list owns its elements.
template <class List>
int destroy_all(const List* list) {
  if (list)
    for (const Container* item : list->values) delete item;
  return destroy(list);
}

}  // namespace

API aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t rank, int dtype,
                               const int64_t* strides, int64_t offset, int, const int64_t*,
                               uint64_t, void* storage) {
  aclTensor* made = new aclTensor;
  made->sizes.assign(sizes, sizes + rank);
  made->strides.assign(strides, strides + rank);
  made->offset = offset;
  made->dtype = dtype;
  made->storage = storage;
  return made;
}
API aclScalar* aclCreateScalar(void* value, int dtype) {
  const char* at = static_cast<const char*>(value);
  aclScalar* made = new aclScalar;
  made->dtype = dtype;
  made->real = load<double>(dtype, at);
  made->whole = is_floating(dtype) ? static_cast<int64_t>(made->real) : load<int64_t>(dtype, at);
  return made;
}
API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return list_of<aclIntArray>(values, count);
}
API aclTensorList* aclCreateTensorList(const aclTensor* const* items, uint64_t count) {
  return list_of<aclTensorList>(items, count);
}
API aclScalarList* aclCreateScalarList(const aclScalar* const* items, uint64_t count) {
  return list_of<aclScalarList>(items, count);
}
API int aclDestroyTensor(const aclTensor* item) { return destroy(item); }
API int aclDestroyScalar(const aclScalar* item) { return destroy(item); }
API int aclDestroyIntArray(const aclIntArray* item) { return destroy(item); }
API int aclDestroyTensorList(const aclTensorList* list) { return destroy_all(list); }
API int aclDestroyScalarList(const aclScalarList* list) { return destroy_all(list); }
API int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  delete executor;
  return kSuccess;
}
// The shape that an operator with an output of unknown length has given it (nonzero).
API int aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* rank) {
  *rank = tensor->sizes.size();
  *sizes = new int64_t[*rank];  // the caller deletes it
  std::copy(tensor->sizes.begin(), tensor->sizes.end(), *sizes);
  return kSuccess;
}
