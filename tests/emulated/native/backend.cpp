// What torch asks of a device beside kernels: guard, allocators, hooks, generators.
#include "backend.h"

#include <ATen/Utils.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace emulated {

c10::DeviceType device_type = c10::DeviceType::CUDA;
c10::DispatchKey dispatch_key = c10::DispatchKey::CUDA;

namespace {

// Errors of the runtime as torch's own.
template <class F>
auto as_torch_error(F&& function) {
  try {
    return function();
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.message);
  } catch (const Error& error) {
    TORCH_CHECK(false, error.message);
  }
  __builtin_unreachable();
}

// Allocators ----------------------------------------------------------------------------------------------------------

void release_memory(void* pointer) {
  if (Device* device = runtime().device_of(pointer)) device->release(pointer);
}

struct MemoryOfDevice final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int index = runtime().current_device();
    c10::Device device(device_type, c10::DeviceIndex(index));
    if (bytes == 0) return {nullptr, nullptr, &release_memory, device};
    void* memory = as_torch_error([&] {
      return runtime().devices[size_t(index)]->allocate(bytes, runtime().current_stream(index));
    });
    return {memory, memory, &release_memory, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Stream* stream = runtime().current_stream(runtime().current_device());
    runtime().launch(stream, "copy_data", {{from, bytes, false}, {to, bytes, true}},
                     [to = runtime().for_kernels(to), from = runtime().for_kernels(from), bytes] { memcpy(to, from, bytes); });
  }
  bool initialized() override { return runtime().is_started(); }
  void emptyCache(c10::MempoolId_t) override {
    for (auto& device : runtime().devices) device->release_cache();
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (Device* device = runtime().device_of(pointer.get()))
      device->record_use(pointer.get(), runtime().stream(stream.device_index(), int(stream.id())));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard<std::recursive_mutex> guard(runtime().lock);
    const MemoryStats& stats = runtime().devices.at(size_t(index))->stats;
    c10::CachingDeviceAllocator::DeviceStats found;
    auto set = [](auto& stat, size_t now, size_t peak, size_t allocated) {
      stat[0].current = int64_t(now);
      stat[0].peak = int64_t(peak);
      stat[0].allocated = int64_t(allocated);
      stat[0].freed = int64_t(allocated - now);
    };
    set(found.allocated_bytes, stats.allocated, stats.peak, stats.total_allocated);
    set(found.active_bytes, stats.allocated, stats.peak, stats.total_allocated);
    set(found.requested_bytes, stats.requested, stats.peak, stats.total_allocated);
    set(found.reserved_bytes, stats.reserved, stats.peak_reserved, stats.reserved);
    set(found.allocation, stats.num_alloc - stats.num_free, stats.num_alloc, stats.num_alloc);
    found.num_ooms = int64_t(stats.num_ooms);
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard<std::recursive_mutex> guard(runtime().lock);
    MemoryStats& stats = runtime().devices.at(size_t(index))->stats;
    stats.peak = stats.allocated;
    stats.peak_reserved = stats.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Device& device = *runtime().devices.at(size_t(index));
    return {device.size - device.stats.reserved, device.size};
  }
};

void release_pinned(void* pointer) { runtime().pinned_release(pointer); }

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = as_torch_error([&] { return runtime().pinned_allocate(bytes); });
    return {memory, memory, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

MemoryOfDevice memory_of_device;
PinnedMemory pinned_memory;

// Guard ----------------------------------------------------------------------------------------------------------------

struct DeviceGuardOfEmulation final : c10::impl::DeviceGuardImplInterface {
  static c10::Device at(int index) { return {device_type, c10::DeviceIndex(index)}; }
  static Stream* stream_of(const c10::Stream& stream) {
    return runtime().stream(stream.device_index(), int(stream.id()));
  }
  static c10::Stream as_torch(Stream* stream) {
    return c10::Stream(c10::Stream::UNSAFE, at(stream->device), c10::StreamId(stream->id));
  }
  static int index_of(c10::Device device) {
    return device.has_index() ? device.index() : runtime().current_device();
  }

  c10::DeviceType type() const override { return device_type; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return at(as_torch_error([&] { return runtime().exchange_device(index_of(device)); }));
  }
  c10::Device getDevice() const override { return at(runtime().current_device()); }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < deviceCount()) runtime().exchange_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override { return as_torch(runtime().current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_torch(runtime().stream(index_of(device), 0)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    // As in torch's pool: the 33rd stream is the first again.
    int index = index_of(device);
    thread_local int next = 0;
    constexpr int kPool = 32;
    std::lock_guard<std::recursive_mutex> guard(runtime().lock);
    auto known = runtime().streams_of(index);
    if (known.size() <= kPool) return as_torch(runtime().new_stream(index));
    return as_torch(known[size_t(1 + next++ % kPool)]);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_torch(runtime().exchange_stream(stream_of(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return stream_of(stream); }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(runtime().devices.size()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  struct Event {
    MarkPtr mark;
    bool is_timed = false;
  };
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    auto* found = static_cast<Event*>(*event);
    if (found == nullptr) *event = found = new Event;
    std::lock_guard<std::recursive_mutex> guard(runtime().lock);
    found->mark = stream_of(stream)->record();
    found->is_timed = flag == c10::EventFlag::BACKEND_DEFAULT;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) stream_of(stream)->wait_for(static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const MarkPtr& mark = static_cast<Event*>(event)->mark;
    if (!mark->stream->is_over(mark->position)) return false;
    saw(mark);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    as_torch_error([&] { wait_on_host("synchronize event", {static_cast<Event*>(event)->mark}); });
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto *first = static_cast<Event*>(from), *second = static_cast<Event*>(to);
    TORCH_CHECK(first != nullptr && second != nullptr, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(first->is_timed && second->is_timed, "Both events must be created with argument 'enable_timing=True'.");
    TORCH_CHECK(first->mark->time_s >= 0 && second->mark->time_s >= 0, "CUDA error: device not ready");
    return (second->mark->time_s - first->mark->time_s) * 1e3;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Stream* found = stream_of(stream);
    MarkPtr mark;
    {
      std::lock_guard<std::recursive_mutex> guard(runtime().lock);
      if (!found->is_over(found->last())) return false;
      mark = found->record();
    }
    saw(mark);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    as_torch_error([&] { wait_on_host("synchronize stream", {stream_of(stream)->record()}); });
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    as_torch_error([&] { runtime().devices.at(size_t(index))->synchronize(); });
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    memory_of_device.recordStream(pointer, stream);
  }

 private:
  // The host knows that a mark has been reached: what it launches from now on comes after it.
  static void saw(const MarkPtr& mark) {
    std::lock_guard<std::recursive_mutex> guard(runtime().lock);
    runtime().join(runtime().host_clock, mark->clock);
  }
};

// Generators -----------------------------------------------------------------------------------------------------------

// A seed, and an offset that moves by what each kernel draws, as in Philox.
struct GeneratorOfDevice final : c10::GeneratorImpl {
  explicit GeneratorOfDevice(c10::DeviceIndex index)
      : GeneratorImpl({device_type, index}, c10::DispatchKeySet(dispatch_key)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK_TYPE(state.device().is_cpu() && state.numel() * int64_t(state.itemsize()) == 16, "RNG state is wrong size");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto found = at::detail::empty_cpu({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(found.mutable_data_ptr());
    words[0] = seed_, words[1] = offset_;
    return found.getIntrusivePtr();
  }

 private:
  GeneratorOfDevice* clone_impl() const override {
    auto* found = new GeneratorOfDevice(device_.index());
    found->seed_ = seed_, found->offset_ = offset_;
    return found;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

at::Generator new_generator(c10::DeviceIndex index) {
  if (index < 0) index = c10::DeviceIndex(runtime().current_device());
  return at::make_generator<GeneratorOfDevice>(index);
}

// Hooks ----------------------------------------------------------------------------------------------------------------

template <class Base>
struct Hooks : Base {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(runtime().devices.size()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchangeDevice(index); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(runtime().current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return as_torch_error([&] { return c10::DeviceIndex(runtime().exchange_device(index)); });
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* pointer) const override { return runtime().is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    Device* device = runtime().device_of(pointer);
    TORCH_CHECK(device != nullptr, "The specified pointer resides on host memory and is not registered with any device.");
    return {device_type, c10::DeviceIndex(device->index)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }
};

struct CudaHooks final : Hooks<at::CUDAHooksInterface> {
  explicit CudaHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory_of_device; }
  int getNumGPUs() const override { return int(deviceCount()); }
  std::string showConfig() const override { return "emulated"; }
  long versionCUDART() const override { return 12000; }
  void deviceSynchronize(c10::DeviceIndex index) const override {
    as_torch_error([&] { runtime().devices.at(size_t(index))->synchronize(); });
  }
};

struct OtherHooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { grow_storage(storage, bytes); }
};

// torch makes its hooks once, at the first question, and its C++ half has asked before anybody can register others. The
// object that it has made holds nothing, so it becomes one of ours by the pointer to its virtual functions.
void take_place_of_hooks() {
  static CudaHooks ours{{}};
  static_assert(sizeof(CudaHooks) == sizeof(at::CUDAHooksInterface));
  auto* theirs = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  memcpy(static_cast<void*>(theirs), static_cast<void*>(static_cast<at::CUDAHooksInterface*>(&ours)), sizeof(void*));
}

}  // namespace

c10::DeviceAllocator* allocator() { return &memory_of_device; }

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (size_t at = 0; at < runtime().devices.size(); ++at) made->push_back(new_generator(c10::DeviceIndex(at)));
    return made;
  }();
  return generators->at(size_t(index < 0 ? runtime().current_device() : index));
}

double elapsed_ms(void* from, void* to) { return DeviceGuardOfEmulation().elapsedTime(from, to, 0); }

void register_backend() {
  static auto* guard = new DeviceGuardOfEmulation;
  static c10::impl::DeviceGuardImplRegistrar registrar(device_type, guard);
  c10::SetAllocator(device_type, &memory_of_device, 100);
  if (device_type == c10::DeviceType::CUDA)
    take_place_of_hooks();
  else
    at::RegisterPrivateUse1HooksInterface(new OtherHooks);
}

}  // namespace emulated
