// The operators that checkpointing, the optimizers and the reference job's models call: for each
// its name, its arguments in CANN's order, and the function of torch that does it on the CPU.
//
// torch_npu calls an operator in two phases: aclnnXGetWorkspaceSize plans, aclnnX launches. Here
// the first checks every argument and makes the task; the second submits it to the stream. Kernels
// and rounding are the CPU's, not Ascend's.
#include <ATen/CPUGeneratorImpl.h>

#include "values.h"

using namespace sim;
using at::Tensor;

namespace {

// torch_npu may ignore the result of the first phase; then there is no plan.
void launch(Task* plan, void* stream) {
  if (!plan) fail(kAclnnNull, "launched without a plan");
  const std::unique_ptr<Task> owned(plan);
  submit(stream, std::move(*plan));
}

// ---- what torch has under no name that would do

void equal(Tensor& out, const Tensor& x, const Tensor& y) { out.fill_(at::equal(x, y)); }

at::Generator generator(uint64_t seed, uint64_t offset) {
  return at::detail::createCPUGenerator(seed + 0x9E3779B97F4A7C15u * offset);
}

// torch_npu hands over the step before this one.
void adamw(Tensor& p, Tensor& mean, Tensor& square, std::optional<Tensor>& max_square, Tensor& grad,
           Tensor& step, double lr, double beta1, double beta2, double decay, double eps,
           bool amsgrad, bool maximize) {
  std::vector<Tensor> maxima;
  if (max_square) maxima.push_back(*max_square);
  at::_fused_adamw_({p}, {grad}, {mean}, {square}, maxima, {step.to(at::kFloat) + 1}, lr, beta1,
                    beta2, decay, eps, amsgrad, maximize);
}

// The first of equals first, which torch's own top-k leaves open.
void topk(Tensor& values, Tensor& indices, const Tensor& x, int64_t k, int64_t dim, bool largest) {
  const auto [sorted, places] = at::sort(x, /*stable=*/true, dim, /*descending=*/largest);
  values.copy_(sorted.narrow(dim, 0, k));
  indices.copy_(places.narrow(dim, 0, k));
}

// A dimension without an index has an empty one.
c10::List<std::optional<Tensor>> given(const std::vector<Tensor>& indices) {
  c10::List<std::optional<Tensor>> out;
  for (const Tensor& index : indices)
    out.push_back(index.numel() ? std::optional(index) : std::nullopt);
  return out;
}
void index(Tensor& out, const Tensor& x, const std::vector<Tensor>& indices) {
  if (out.numel()) at::index_out(out, x, given(indices));
}
void index_put(Tensor& x, const std::vector<Tensor>& indices, const Tensor& values, bool add) {
  if (values.numel()) x.index_put_(given(indices), values, add);
}

// How many there are shows only when it has run.
void nonzero(Tensor& out, const Tensor& x, const Value* shown) {
  const Tensor found = at::nonzero(x);
  out.narrow(0, 0, found.size(0)).copy_(found);
  replace(shown, out.narrow(0, 0, found.size(0)));
}

}  // namespace

// ENTRIES(X, (arguments of aclnnX), function object, what to call it with)
#define ENTRIES(Name, params, callable, ...)                                                   \
  API int aclnn##Name##GetWorkspaceSize(UNPACKED params, uint64_t* workspace_, Task** plan_) { \
    *workspace_ = 0;                                                                           \
    *plan_ = nullptr;                                                                          \
    return guarded("aclnn" #Name, [&] { *plan_ = new Task(later(callable, __VA_ARGS__)); });   \
  }                                                                                            \
  ENTRY(aclnn##Name, (void*, uint64_t, Task* plan, void* stream), launch(plan, stream);)
#define UNPACKED(...) __VA_ARGS__

// function(out, x, ...) where torch has one; out.method(x, ...); out = function(x, ...).
#define OPERATOR(Name, params, function, ...) \
  ENTRIES(Name, params, [](auto&... with) { function(with...); }, __VA_ARGS__)
#define METHOD(Name, params, method, ...) \
  ENTRIES(Name, params, ([](auto& y, auto&... with) { y.method(with...); }), __VA_ARGS__)
#define RESULT(Name, params, function, ...) \
  ENTRIES(Name, params, ([](auto& y, auto&... with) { y.copy_(function(with...)); }), __VA_ARGS__)

// OPERATOR, and the same in place.
#define BOTH_FORMS(Name, params, function, ...)                                       \
  OPERATOR(Name, (In x, UNPACKED params, Out out), function, out, x, __VA_ARGS__)     \
  OPERATOR(Inplace##Name, (Out x, UNPACKED params), function, x, x, __VA_ARGS__)
#define UNARY(Name, function) OPERATOR(Name, (In x, Out out), function, out, x)
#define COMPARISON(Name, function)                                           \
  OPERATOR(Name##Tensor, (In x, In y, Out out), function, out, x, y)         \
  OPERATOR(Name##Scalar, (In x, Number y, Out out), function, out, x, y)

// ---- copies, casts, layout
METHOD(InplaceCopy, (Out out, In x), copy_, out, x)
METHOD(InplaceZero, (Out out), zero_, out)
METHOD(InplaceOne, (Out out), fill_, out, 1)
METHOD(InplaceFillScalar, (Out out, Number value), fill_, out, value)
OPERATOR(Cat, (List parts, int64_t dim, Out out), at::cat_out, out, parts, dim)
OPERATOR(Stack, (List parts, int64_t dim, Out out), at::stack_out, out, parts, dim)
OPERATOR(ConstantPadNd, (In x, Dims pads, Number value, Out out),
         at::constant_pad_nd_out, out, x, pads, value)
OPERATOR(Arange, (Number start, Number end, Number step, Out out),
         at::arange_out, out, start, end, step)
RESULT(RepeatInterleaveIntWithDim, (In x, int64_t repeats, int64_t dim, int64_t, Out out),
       at::repeat_interleave, out, x, repeats, dim)
OPERATOR(Triu, (In x, int64_t diagonal, Out out), at::triu_out, out, x, diagonal)

// ---- elementwise
BOTH_FORMS(Add, (In y, Number alpha), at::add_out, y, alpha)
BOTH_FORMS(Adds, (Number y, Number alpha), at::add_out, y, alpha)
BOTH_FORMS(Sub, (In y, Number alpha), at::sub_out, y, alpha)
BOTH_FORMS(Subs, (Number y, Number alpha), at::sub_out, y, alpha)
BOTH_FORMS(Mul, (In y), at::mul_out, y)
BOTH_FORMS(Muls, (Number y), at::mul_out, y)
BOTH_FORMS(Div, (In y), at::div_out, y)
BOTH_FORMS(Divs, (Number y), at::div_out, y)
BOTH_FORMS(Addcmul, (In y, In z, Number value), at::addcmul_out, y, z, value)
BOTH_FORMS(Addcdiv, (In y, In z, Number value), at::addcdiv_out, y, z, value)
BOTH_FORMS(Lerps, (In y, Number weight), at::lerp_out, y, weight)
OPERATOR(Rsubs, (In x, Number y, Number alpha, Out out), at::rsub_out, out, x, y, alpha)
OPERATOR(PowTensorScalar, (In x, Number y, Out out), at::pow_out, out, x, y)
OPERATOR(PowScalarTensor, (Number x, In y, Out out), at::pow_out, out, x, y)
OPERATOR(Clamp, (In x, Maybe<at::Scalar> least, Maybe<at::Scalar> most, Out out),
         at::clamp_out, out, x, least, most)
OPERATOR(InplaceMaskedFillScalar, (Out x, In mask, Number value),
         at::masked_fill_out, x, x, mask, value)
UNARY(Sqrt, at::sqrt_out)
UNARY(Rsqrt, at::rsqrt_out)
UNARY(Neg, at::neg_out)
UNARY(Abs, at::abs_out)
UNARY(Sign, at::sign_out)
UNARY(Reciprocal, at::reciprocal_out)
UNARY(Cos, at::cos_out)
UNARY(Sin, at::sin_out)
UNARY(Silu, at::silu_out)
OPERATOR(SiluBackward, (In grad, In x, Out out), at::silu_backward_out, out, grad, x)

// ---- comparisons
COMPARISON(Eq, at::eq_out)
COMPARISON(Ne, at::ne_out)
COMPARISON(Le, at::le_out)
COMPARISON(Gt, at::gt_out)
RESULT(IsClose, (In x, In y, double rtol, double atol, bool equal_nan, Out out),
       at::isclose, out, x, y, rtol, atol, equal_nan)
OPERATOR(Equal, (In x, In y, Out out), equal, out, x, y)

// ---- reductions, matrix products
OPERATOR(ReduceSum, (In x, Dims dims, bool keep, int, Out out), at::sum_out, out, x, dims, keep)
OPERATOR(Mean, (In x, Dims dims, bool keep, int, Out out), at::mean_out, out, x, dims, keep)
OPERATOR(All, (In x, Dims dims, bool keep, Out out), at::all_out, out, x, dims, keep)
OPERATOR(Any, (In x, Dims dims, bool keep, Out out), at::any_out, out, x, dims, keep)
OPERATOR(Max, (In x, Out out), at::max_out, out, x)
OPERATOR(Min, (In x, Out out), at::min_out, out, x)
OPERATOR(LinalgVectorNorm, (In x, Number ord, Dims dims, bool keep, int, Out out),
         at::linalg_vector_norm_out, out, x, ord, dims, keep)
OPERATOR(Matmul, (In x, In y, Out out, int8_t), at::matmul_out, out, x, y)
RESULT(Bincount, (In x, Maybe<Tensor> weights, int64_t, Out out),
       at::bincount, out, x, weights, resolved(out).numel())

// ---- random numbers: repeatable from seed and offset, not Ascend's
METHOD(InplaceNormal, (Out out, float mean, float deviation, int64_t seed, int64_t offset),
       normal_, out, mean, deviation, generator(seed, offset))
METHOD(InplaceUniform, (Out out, double low, double high, uint64_t seed, uint64_t offset),
       uniform_, out, low, high, generator(seed, offset))

// ---- optimizers; the weight of lerp is a scalar, unlike in other list operators without V2
OPERATOR(ForeachCopy, (List x, List out), at::_foreach_copy_, out, x)
OPERATOR(ForeachSqrt, (List x, List out), at::_foreach_sqrt_out, out, x)
OPERATOR(ForeachAddScalarV2, (List x, Number y, List out), at::_foreach_add_out, out, x, y)
OPERATOR(ForeachMulScalarV2, (List x, Number y, List out), at::_foreach_mul_out, out, x, y)
OPERATOR(ForeachDivScalarList, (List x, Numbers y, List out), at::_foreach_div_out, out, x, y)
OPERATOR(ForeachLerpScalar, (List x, List end, Number weight, List out),
         at::_foreach_lerp_out, out, x, end, weight)
OPERATOR(ForeachAddcmulScalarV2, (List x, List y, List z, Number value, List out),
         at::_foreach_addcmul_out, out, x, y, z, value)
OPERATOR(ApplyAdamWV2, (Out p, Out mean, Out square, Maybe<Tensor> top, In grad, In step, float lr,
                        float beta1, float beta2, float decay, float eps, bool ams, bool maximize),
         adamw, p, mean, square, top, grad, step, lr, beta1, beta2, decay, eps, ams, maximize)

// ---- attention and cross entropy
OPERATOR(Softmax, (In x, int64_t dim, Out out), at::softmax_out, out, x, dim)
OPERATOR(LogSoftmax, (In x, int64_t dim, Out out), at::log_softmax_out, out, x, dim)
OPERATOR(SoftmaxBackward, (In grad, In output, int64_t dim, Out out),
         at::_softmax_backward_data_out, out, grad, output, dim, resolved(out).scalar_type())
OPERATOR(LogSoftmaxBackward, (In grad, In output, int64_t dim, Out out),
         at::_log_softmax_backward_data_out, out, grad, output, dim, resolved(out).scalar_type())
OPERATOR(NLLLoss, (In x, In target, Maybe<Tensor> weight, int64_t reduction, int64_t ignored,
                   Out out, Out total),
         at::nll_loss_forward_out, out, total, x, target, weight, reduction, ignored)
OPERATOR(NLLLossBackward, (In grad, In x, In target, Maybe<Tensor> weight, int64_t reduction,
                           int64_t ignored, In total, Out out),
         at::nll_loss_backward_out, out, grad, x, target, weight, reduction, ignored, total)

// ---- by index
OPERATOR(Embedding, (In weight, In indices, Out out), at::embedding_out, out, weight, indices)
OPERATOR(EmbeddingDenseBackward, (In grad, In ids, int64_t rows, int64_t pad, bool scale, Out out),
         at::embedding_dense_backward_out, out, grad, ids, rows, pad, scale)
OPERATOR(Index, (In x, List indices, Out out), index, out, x, indices)
OPERATOR(IndexPutImpl, (Out x, List indices, In values, bool accumulate, bool),
         index_put, x, indices, values, accumulate)
OPERATOR(IndexSelect, (In x, int64_t dim, In ids, Out out), at::index_select_out, out, x, dim, ids)
OPERATOR(IndexAdd, (In x, int64_t dim, In index, In source, Number alpha, Out out),
         at::index_add_out, out, x, dim, index, source, alpha)
OPERATOR(Gather, (In x, int64_t dim, In index, Out out), at::gather_out, out, x, dim, index)
OPERATOR(ScatterAdd, (In x, int64_t dim, In index, In source, Out out),
         at::scatter_add_out, out, x, dim, index, source)
OPERATOR(Topk, (In x, int64_t k, int64_t dim, bool largest, bool, Out values, Out indices),
         topk, values, indices, x, k, dim, largest)
OPERATOR(Nonzero, (In x, Out out), nonzero, out, x, out.handle)
