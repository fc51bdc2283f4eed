// Kernels of the emulated accelerator: those of the CPU, run later by the thread of a stream on the device's memory.
//
//   call of an operator
//     views             run now, for they touch no memory
//     shapes            of results come from the meta kernel, so the host need not wait
//     launch            the kernel of the CPU runs in the stream, on tensors over the same bytes
//     no meta kernel    (nonzero, equal, item ..): the host waits, as it does on a real device
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include "backend.h"

namespace emulated {
namespace {

using c10::IValue;
using torch::jit::Stack;

c10::Device device_at(int index) { return {device_type, c10::DeviceIndex(index)}; }

bool is_on_device(const at::Tensor& tensor) { return tensor.device().type() == device_type; }

// A tensor of another kind of device over the same bytes.
at::Tensor over_same_bytes(const at::Tensor& tensor, c10::DispatchKey key, void* bytes) {
  c10::Device device(key == c10::DispatchKey::Meta ? c10::kMeta : c10::kCPU);
  bool is_resizable = key == c10::DispatchKey::Meta;
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(),
                                                       c10::DataPtr(bytes, device),
                                                       is_resizable ? c10::GetAllocator(c10::kMeta) : nullptr,
                                                       is_resizable);
  auto found = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKeySet(key),
                                                        tensor.dtype());
  auto* impl = found.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return found;
}

// A number that is on the CPU stays there: it has no shape to speak of, and a meta kernel may look at it.
at::Tensor for_meta(const at::Tensor& tensor) {
  return is_on_device(tensor) ? over_same_bytes(tensor, c10::DispatchKey::Meta, nullptr) : tensor;
}

// Applies a function to each tensor of a value; lists are copied.
template <class F>
IValue with_each_tensor(const IValue& value, F&& function) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(function(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> found;
    for (const at::Tensor& tensor : value.toTensorVector()) found.push_back(tensor.defined() ? function(tensor) : tensor);
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> found;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      found.push_back(tensor.has_value() && tensor->defined() ? std::optional<at::Tensor>(function(*tensor)) : tensor);
    return found;
  }
  return value;
}

bool holds_tensors(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  if (auto list = type->cast<c10::ListType>()) {
    type = list->getElementType();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  }
  return type->isSubtypeOf(*c10::TensorType::get());
}

// What the schema of an operator says, found out once.
struct Operator {
  std::string name;
  std::vector<bool> is_written;   // by argument
  std::vector<int> returns_from;  // by result: the argument that is returned, or -1
  bool is_view = false, is_out = false, is_random = false, has_meta = false, returns_values = false, waits = false;
  int generator = -1;

  explicit Operator(const c10::OperatorHandle& op) {
    const c10::FunctionSchema& schema = op.schema();
    name = schema.name().substr(schema.name().find("::") + 2);
    for (const c10::Argument& argument : schema.arguments()) {
      const c10::AliasInfo* alias = argument.alias_info();
      is_written.push_back(alias != nullptr && alias->isWrite());
      is_out = is_out || argument.is_out();
      auto type = argument.type();
      if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
      if (type->kind() == c10::TypeKind::GeneratorType) generator = int(is_written.size()) - 1;
    }
    for (const c10::Argument& result : schema.returns()) {
      const c10::AliasInfo* alias = result.alias_info();
      returns_from.push_back(-1);
      if (!holds_tensors(result)) returns_values = true;
      if (alias == nullptr) continue;
      if (!alias->isWrite()) is_view = true;
      for (size_t at = 0; at < schema.arguments().size(); ++at) {
        const c10::AliasInfo* of_argument = schema.arguments()[at].alias_info();
        if (of_argument != nullptr && of_argument->beforeSets() == alias->beforeSets())
          returns_from.back() = int(at);
      }
    }
    for (at::Tag tag : op.getTags())
      if (tag == at::Tag::nondeterministic_seeded) is_random = true;
    has_meta = op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
    static const std::set<std::string> kNoMeta = {"_unique2", "unique_dim", "unique_consecutive", "nonzero",
                                                  "masked_select", "bincount", "_local_scalar_dense", "equal"};
    waits = returns_values || !has_meta || kNoMeta.count(name) > 0;
  }
};

Operator& operator_of(const c10::OperatorHandle& op) {
  static auto* known = new std::unordered_map<c10::OperatorName, std::unique_ptr<Operator>>;
  static std::mutex mutex;
  std::lock_guard<std::mutex> guard(mutex);
  auto& found = (*known)[op.operator_name()];
  if (found == nullptr) found = std::make_unique<Operator>(op);
  return *found;
}

void refuse_mixture(const Operator& op, const at::Tensor& tensor, c10::Device device) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but got a tensor on ", tensor.device(),
              ", different from other tensors on ", device, " (when running ", op.name, ")");
}

// The tensors of a kernel: what is written and read, and that all of it is on one device.
struct Uses {
  std::optional<c10::Device> device;
  std::vector<Runtime::Span> spans;

  void add(const Operator& op, const at::Tensor& tensor, bool is_write) {
    if (!is_on_device(tensor)) {
      bool may_be_elsewhere = tensor.device().is_cpu() && ((tensor.dim() == 0 && !is_write) || tensor.numel() == 0);
      if (!may_be_elsewhere && device.has_value()) refuse_mixture(op, tensor, *device);
      if (!may_be_elsewhere) elsewhere = tensor;
      return;
    }
    if (!device.has_value()) device = tensor.device();
    if (*device != tensor.device()) refuse_mixture(op, tensor, *device);
    if (elsewhere.defined()) refuse_mixture(op, elsewhere, *device);
    spans.push_back(span_of(tensor, is_write));
  }

 private:
  at::Tensor elsewhere;
};

IValue on_other_device(const c10::Argument& argument, const IValue& value, c10::Device device) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  if (type->kind() == c10::TypeKind::DeviceObjType && !value.isNone()) return device;
  return value;
}

at::Tensor empty_like_meta(const at::Tensor& meta, c10::Device device) {
  return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device));
}

void copy_results(const std::string& name, const Stack& stack, const std::vector<IValue>& wanted) {
  for (size_t at = 0; at < wanted.size(); ++at) {
    if (wanted[at].isNone()) continue;
    auto copy = [&](const at::Tensor& to, const at::Tensor& from) {
      if (from.numel() == 0 && to.numel() != 0) {  // what the CPU's kernel has no use for, as batch norm in eval mode
        to.zero_();
        return;
      }
      TORCH_CHECK(to.sizes() == from.sizes() && to.dtype() == from.dtype(), "the meta kernel of ", name, " says ",
                  to.sizes(), " ", to.dtype(), " of result ", at, ", the kernel ", from.sizes(), " ", from.dtype());
      to.copy_(from);
    };
    if (wanted[at].isTensor()) {
      if (!wanted[at].toTensor().defined()) continue;
      TORCH_CHECK(stack[at].toTensor().defined(), "the kernel of ", name, " has no result ", at);
      copy(wanted[at].toTensor(), stack[at].toTensor());
    } else {
      auto to = wanted[at].toTensorVector(), from = stack[at].toTensorVector();
      TORCH_CHECK(to.size() == from.size(), "the kernel of ", name, " has another number of results");
      for (size_t each = 0; each < to.size(); ++each) copy(to[each], from[each]);
    }
  }
}

void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

// A view: the kernel of the CPU says what part of the memory it is, and touches none of it.
void run_view(const c10::OperatorHandle& op, const Operator& known, Stack* stack) {
  auto arguments = torch::jit::pop(*stack, known.is_written.size());
  at::Tensor base;
  Stack on_cpu;
  for (const IValue& argument : arguments)
    on_cpu.push_back(with_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!base.defined()) base = tensor;
      return is_on_device(tensor) ? over_same_bytes(tensor, c10::DispatchKey::CPU,
                                                    const_cast<void*>(tensor.storage().data()))
                                  : tensor;
    }));
  run_on_cpu(op, on_cpu);
  for (const IValue& result : on_cpu)
    stack->push_back(with_each_tensor(result, [&](const at::Tensor& view) {
      auto found = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                            base.unsafeGetTensorImpl()->key_set(), view.dtype());
      found.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
      return found;
    }));
}

// The draws of one kernel, from the seed of the device's generator and an offset that moves by what is drawn.
IValue draws(const IValue& given, c10::Device device, int64_t numel) {
  at::Generator generator = given.isNone() ? default_generator(device.index()) : given.toGenerator();
  if (generator.device().is_cpu()) TORCH_CHECK(false, "Expected a '", device, "' generator but found 'cpu'");
  std::lock_guard<std::mutex> guard(generator.mutex());
  uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 4 * uint64_t((std::max<int64_t>(numel, 1) + 255) / 256));
  uint64_t seed = generator.current_seed() * 0x9e3779b97f4a7c15ULL + offset * 0xbf58476d1ce4e5b9ULL;
  return at::detail::createCPUGenerator(seed ^ (seed >> 31));
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Operator& known = operator_of(op);
  if (known.is_view) return run_view(op, known, stack);
  const auto& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "the emulated accelerator has no kernel of ",
              schema.operator_name());
  auto arguments = torch::jit::pop(*stack, known.is_written.size());

  Uses uses;
  bool is_written_empty = false;
  int64_t largest = 0;
  for (size_t at = 0; at < arguments.size(); ++at)
    with_each_tensor(arguments[at], [&](const at::Tensor& tensor) {
      uses.add(known, tensor, known.is_written[at]);
      is_written_empty = is_written_empty || (known.is_written[at] && tensor.numel() == 0);
      largest = std::max(largest, tensor.numel());
      return tensor;
    });
  for (size_t at = 0; at < arguments.size() && !uses.device.has_value(); ++at)
    if (arguments[at].isDevice()) uses.device = arguments[at].toDevice();
  c10::Device device = uses.device.value_or(device_at(runtime().current_device()));
  if (!device.has_index()) device.set_index(c10::DeviceIndex(runtime().current_device()));
  c10::DeviceGuard on_device(device);
  Stream* stream = runtime().current_stream(device.index());

  if (known.is_random && known.generator >= 0)
    arguments[size_t(known.generator)] = draws(arguments[size_t(known.generator)], device, largest);
  else if (known.is_random && known.name != "native_dropout")
    TORCH_WARN_ONCE("the emulated accelerator takes the draws of ", known.name, " from the generator of the CPU");

  // Shapes of what comes out, without the data.
  std::vector<IValue> results(known.returns_from.size());
  bool waits = known.waits;
  if (!waits && (!known.is_out || is_written_empty)) {
    Stack meta;
    for (size_t at = 0; at < arguments.size(); ++at)
      meta.push_back(with_each_tensor(on_other_device(schema.arguments()[at], arguments[at], c10::kMeta), for_meta));
    if (known.is_random && known.generator >= 0) meta[size_t(known.generator)] = IValue();
    Stack written = meta;
    try {
      at::AutoDispatchBelowADInplaceOrView guard;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &meta);
    } catch (const c10::NotImplementedError&) {
      waits = true;
    }
    for (size_t at = 0; !waits && at < results.size(); ++at) {
      if (known.returns_from[at] >= 0) continue;
      results[at] = with_each_tensor(meta[at], [&](const at::Tensor& one) { return empty_like_meta(one, device); });
    }
    for (size_t at = 0; !waits && at < arguments.size(); ++at)
      if (known.is_written[at] && arguments[at].isTensor() && arguments[at].toTensor().defined() &&
          arguments[at].toTensor().sizes() != written[at].toTensor().sizes()) {
        arguments[at].toTensor().resize_(written[at].toTensor().sizes());
        uses.spans.push_back(span_of(arguments[at].toTensor(), true));
      }
  }

  auto on_cpu = std::make_shared<Stack>();
  for (size_t at = 0; at < arguments.size(); ++at)
    on_cpu->push_back(with_each_tensor(
        on_other_device(schema.arguments()[at], arguments[at], c10::kCPU), [](const at::Tensor& tensor) {
          return is_on_device(tensor) ? for_kernel(tensor) : tensor.clone();  // a number is read when it is launched
        }));

  if (waits) {
    auto error = std::make_shared<std::exception_ptr>();
    Position position = runtime().launch(stream, known.name, uses.spans, [op, on_cpu, error] {
      try {
        run_on_cpu(op, *on_cpu);
      } catch (...) {
        *error = std::current_exception();
      }
    });
    (void)position;
    wait_on_host(known.name.c_str(), {stream->record()});
    if (*error) std::rethrow_exception(*error);
    for (size_t at = 0; at < results.size(); ++at)
      results[at] = known.returns_from[at] >= 0 ? arguments[size_t(known.returns_from[at])]
                                                : with_each_tensor((*on_cpu)[at], [&](const at::Tensor& one) {
                                                    at::Tensor found = empty_like_meta(one, device);
                                                    runtime().launch(stream, known.name, {span_of(found, true)},
                                                                     [to = for_kernel(found), one] { to.copy_(one); });
                                                    return found;
                                                  });
  } else {
    std::vector<IValue> wanted(results.size());
    for (size_t at = 0; at < results.size(); ++at) {
      wanted[at] = with_each_tensor(results[at], [&](const at::Tensor& tensor) {
        uses.spans.push_back(span_of(tensor, true));
        return for_kernel(tensor);
      });
      if (known.returns_from[at] >= 0) results[at] = arguments[size_t(known.returns_from[at])];
    }
    runtime().launch(stream, known.name, uses.spans, [op, on_cpu, wanted, name = known.name] {
      run_on_cpu(op, *on_cpu);
      copy_results(name, *on_cpu, wanted);
    });
  }
  for (IValue& result : results) stack->push_back(std::move(result));
}

// Kernels of its own -------------------------------------------------------------------------------------------------

c10::Device device_or_current(std::optional<c10::Device> device) {
  c10::Device found = device.value_or(device_at(runtime().current_device()));
  if (!found.has_index()) found.set_index(c10::DeviceIndex(runtime().current_device()));
  return found;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(dispatch_key),
                                   c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, allocator(), c10::DispatchKeySet(dispatch_key),
                                           c10::dtype_or_default(dtype));
}

void grow(const c10::Storage& storage, c10::Device device, size_t bytes) {
  c10::DeviceGuard guard(device);
  Stream* stream = runtime().current_stream(device.index());
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DataPtr memory = allocator()->allocate(bytes);
  size_t kept = std::min(impl->nbytes(), bytes);
  if (kept > 0) {
    const void* from = impl->data();
    void* to = memory.get();
    runtime().launch(stream, "resize", {{from, kept, false}, {to, kept, true}},
                     [from = runtime().for_kernels(from), to = runtime().for_kernels(to), kept] { memcpy(to, from, kept); });
  }
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(bytes);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    impl->set_sizes_contiguous(size);
    impl->empty_tensor_restride(*format);
  } else {
    impl->set_sizes_contiguous(size);
  }
  size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(),
                                                  size_t(self.storage_offset()));
  if (self.numel() > 0 && bytes > self.storage().nbytes()) grow(self.storage(), self.device(), bytes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  at::native::checkSetStorage(self, storage, offset, size, stride, true);
  auto* impl = self.unsafeGetTensorImpl();
  if (stride.data() != nullptr)
    impl->set_sizes_and_strides(size, stride, offset);
  else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), size_t(offset));
  if (self.numel() > 0 && bytes > storage.nbytes()) grow(storage, self.device(), bytes);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(other.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  int64_t size = int64_t(storage.nbytes() / self.itemsize());
  return set_storage(self, storage, 0, {size}, {});
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return set_storage(self, storage, 0, {0}, {});
}

// Copies, within a device, between two, and to and from the host.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  TORCH_CHECK(self.device().type() != c10::kMeta && source.device().type() != c10::kMeta, "Cannot copy out of meta tensor; no data!");
  at::Tensor from = source.expand(self.sizes());
  if (self.numel() == 0) return self;
  bool to_device = is_on_device(self), from_device = is_on_device(source);
  size_t bytes = size_t(self.numel()) * self.itemsize();

  if (to_device && from_device) {
    Stream* stream = runtime().current_stream(source.device().index());
    Stream* other = runtime().current_stream(self.device().index());
    bool is_between = self.device() != source.device();
    if (is_between) {
      stream->wait_for(other->record());
      runtime().count_bytes(&Counters::bytes_between_devices, bytes);
    }
    runtime().launch(stream, is_between ? "copy between devices" : "copy_", {span_of(from, false), span_of(self, true)},
                     [to = for_kernel(self), from = for_kernel(from)] { to.copy_(from); });
    if (is_between) other->wait_for(stream->record());
    return self;
  }
  const at::Tensor& on_device = to_device ? self : from;
  const at::Tensor& on_host = to_device ? from : self;
  c10::DeviceGuard guard(on_device.device());
  Stream* stream = runtime().current_stream(on_device.device().index());
  bool is_pinned = runtime().is_pinned(on_host.storage().data());
  if (to_device) {
    runtime().count_bytes(&Counters::bytes_to_device, bytes);
    // Memory that is not pinned has been read when the call returns; pinned memory is read at some time later.
    at::Tensor seen = non_blocking && !is_pinned ? from.clone() : from;
    runtime().launch(stream, "copy to device", {span_of(self, true)}, [to = for_kernel(self), seen] { to.copy_(seen); });
    if (non_blocking && is_pinned) runtime().pinned_record_use(on_host.storage().data(), stream);
    if (!non_blocking) wait_on_host("copy to device", {stream->record()});
  } else {
    runtime().count_bytes(&Counters::bytes_to_host, bytes);
    bool is_late = non_blocking && is_pinned;
    if (is_late && self.is_contiguous())  // until the copy has come there is nothing to read
      memset(static_cast<char*>(self.data_ptr()), 0xff, bytes);
    auto work = [to = self, from = for_kernel(from)] { to.copy_(from); };
    runtime().launch(stream, "copy to host", {span_of(from, false)}, work);
    if (is_late)
      runtime().pinned_record_use(on_host.storage().data(), stream);
    else
      wait_on_host("copy to host", {stream->record()});
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  at::Tensor to = dst;
  copy_(to, self, non_blocking);
  return dst;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  Stream* stream = runtime().current_stream(self.device().index());
  auto found = std::make_shared<at::Scalar>();
  runtime().count_bytes(&Counters::bytes_to_host, self.itemsize());
  runtime().launch(stream, "item", {span_of(self, false)}, [found, from = for_kernel(self)] { *found = at::_local_scalar_dense(from); });
  wait_on_host("item", {stream->record()});
  return *found;
}

void record_stream(at::Tensor& self, at::Stream stream) {
  int device = self.device().index();
  if (self.storage().data() == nullptr) return;
  runtime().devices[size_t(device)]->record_use(const_cast<void*>(self.storage().data()),
                                                runtime().stream(stream.device_index(), int(stream.id())));
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0)
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

at::Tensor native_dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double scale) {
  return grad.mul(mask).mul_(scale);
}

}  // namespace

Runtime::Span span_of(const at::Tensor& tensor, bool is_write) {
  if (tensor.numel() == 0) return {nullptr, 0, is_write};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  size_t item = tensor.itemsize();
  const char* begin = static_cast<const char*>(tensor.storage().data()) + size_t(tensor.storage_offset()) * item;
  return {begin, size_t(last + 1) * item, is_write};
}

at::Tensor for_kernel(const at::Tensor& tensor) {
  void* bytes = tensor.storage().data() == nullptr ? nullptr : const_cast<void*>(tensor.storage().data());
  return over_same_bytes(tensor, c10::DispatchKey::CPU, runtime().for_kernels(bytes));
}

void grow_storage(const c10::Storage& storage, size_t bytes) { grow(storage, storage.device(), bytes); }

void wait_on_host(const char* kind, const std::vector<MarkPtr>& marks) {
  runtime().wait_on_host(kind, marks);
  for (const MarkPtr& mark : marks) runtime().raise_error(mark->stream->device);
}

void register_kernels() {
  static const std::set<std::string> kOwn = {"empty", "empty_strided", "resize_", "set_", "copy_", "_copy_from",
                                             "_local_scalar_dense", "record_stream", "native_dropout",
                                             "native_dropout_backward"};
  static auto* others = new torch::Library(torch::Library::IMPL, "_", dispatch_key, __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  static auto* own = new torch::Library(torch::Library::IMPL, "aten", dispatch_key, __FILE__, __LINE__);
  // Some operators have a kernel for every device in other ones' terms, and a better one for the CPU.
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op.has_value() || name.name.rfind("aten::", 0) != 0 || kOwn.count(name.name.substr(6)) > 0) continue;
    auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    if (has(c10::DispatchKey::CPU) && (has(c10::DispatchKey::CompositeExplicitAutograd) ||
                                       has(c10::DispatchKey::CompositeImplicitAutograd)))
      own->impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  own->impl("empty.memory_format", empty);
  own->impl("empty_strided", empty_strided);
  own->impl("resize_", resize_);
  own->impl("set_.source_Storage_storage_offset", set_storage);
  own->impl("set_.source_Tensor", set_tensor);
  own->impl("set_.source_Storage", set_whole_storage);
  own->impl("set_", set_empty);
  own->impl("copy_", copy_);
  own->impl("_copy_from", copy_from);
  own->impl("_local_scalar_dense", local_scalar_dense);
  own->impl("record_stream", record_stream);
  own->impl("native_dropout", native_dropout);
  own->impl("native_dropout_backward", native_dropout_backward);
}

}  // namespace emulated
