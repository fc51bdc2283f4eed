#include "runtime.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

namespace emulated {

Settings settings;
std::function<std::shared_ptr<Stack>()> take_stack;
std::function<std::string()> line_of_program;
std::function<void(const std::function<void()>&)> without_interpreter_lock;

namespace {

using Guard = std::lock_guard<std::recursive_mutex>;
constexpr size_t kRound = 512;
constexpr size_t kMostRaces = 100;
constexpr int kPoison = 0xff;  // nan in every floating type, -1 in integers

thread_local int this_device = 0;
thread_local std::vector<Stream*> this_streams;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Where the program is, taken before the runtime's lock is: whoever has the interpreter's lock may wait for ours.
thread_local std::shared_ptr<Stack> stack_of_call;

struct TakesStack {
  bool is_outermost = stack_of_call == nullptr && settings.check_order && take_stack;
  TakesStack() {
    if (is_outermost) stack_of_call = take_stack();
  }
  ~TakesStack() {
    if (is_outermost) stack_of_call = nullptr;
  }
};

// An access to memory that the host may not touch is named before the process ends as it would on its own.
struct sigaction before_us[2];

void write_text(const char* text) {
  if (::write(2, text, strlen(text)) < 0) _exit(139);
}

void on_fault(int signal, siginfo_t* info, void* context) {
  for (auto& device : runtime().devices) {
    if (device->contains(info->si_addr)) {
      write_text("emulated accelerator: the host touched memory of device ");
      char number[2] = {char('0' + device->index), 0};
      write_text(number);
      write_text("; the stack of this thread follows where faulthandler is enabled\n");
    }
  }
  struct sigaction& next = before_us[signal == SIGSEGV ? 0 : 1];
  if (next.sa_flags & SA_SIGINFO) {
    if (next.sa_sigaction != nullptr) return next.sa_sigaction(signal, info, context);
  } else if (next.sa_handler != SIG_DFL && next.sa_handler != SIG_IGN) {
    return next.sa_handler(signal);
  }
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

}  // namespace

Runtime& runtime() {
  static Runtime* one = new Runtime;  // never destroyed: its threads may outlive the interpreter
  return *one;
}

// Streams ------------------------------------------------------------------------------------------------------------

Stream::Stream(int device, int id, size_t number)
    : device(device), id(id), number(number), draws_(settings.seed * 1000003 + size_t(device) * 1009 + size_t(id)) {}

Position Stream::launch(std::string name, std::function<void()> work) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!is_started_) {
    is_started_ = true;
    std::thread([this] { loop(); }).detach();
  }
  bool is_mark = name == "event" || name.rfind("wait for stream", 0) == 0;
  queue_.push_back({std::move(name), std::move(work), is_mark});
  Position position = ++launched_;
  changed_.notify_all();
  return position;
}

void Stream::loop() {
  this_device = device;
  for (;;) {
    Item item;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (queue_.empty()) now_ = "nothing";
      changed_.wait(lock, [this] { return !queue_.empty(); });
      item = std::move(queue_.front());
      queue_.pop_front();
      now_ = item.name;
    }
    if (settings.lag_us > 0 && settings.lag_every > 0 && !item.is_mark && draws_() % settings.lag_every == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(draws_() % settings.lag_us));
    try {
      item.work();
    } catch (const std::exception& error) {
      runtime().fail(device, item.name + ": " + error.what());
    } catch (...) {
      runtime().fail(device, item.name + ": unknown error");
    }
    item.work = nullptr;  // what it holds is released before its position is over
    std::lock_guard<std::mutex> guard(mutex_);
    ++done_;
    changed_.notify_all();
  }
}

MarkPtr Stream::record() {
  Runtime& run = runtime();
  Guard guard(run.lock);
  auto mark = std::make_shared<Mark>();
  mark->stream = this;
  mark->position = launch("event", [mark] { mark->time_s = runtime().now_s(); });
  run.join(clock, run.host_clock);
  if (clock.size() <= number) clock.resize(number + 1);
  clock[number] = mark->position;
  mark->clock = clock;
  return mark;
}

void Stream::wait_for(const MarkPtr& mark) {
  Runtime& run = runtime();
  Guard guard(run.lock);
  run.join(clock, mark->clock);
  if (mark->stream == this) return;
  std::string name = "wait for stream " + std::to_string(mark->stream->id) + " of device " +
                     std::to_string(mark->stream->device);
  launch(name, [mark] { mark->stream->wait_on_host(mark->position); });
}

void Stream::wait_on_host(Position position) {
  if (is_over(position)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  auto limit = std::chrono::duration<double>(settings.deadline_s);
  if (changed_.wait_for(lock, limit, [&] { return done_.load() >= position; })) return;
  std::string now = now_;
  lock.unlock();
  std::string others;
  for (Stream* other : runtime().streams_of(device))
    if (other != this && other->doing() != "nothing")
      others += "; stream " + std::to_string(other->id) + " is at \"" + other->doing() + "\"";
  throw Error("stream " + std::to_string(id) + " of device " + std::to_string(device) + " has not come to an end in " +
              std::to_string(int(settings.deadline_s)) + " s: it is at \"" + now + "\"" + others);
}

std::string Stream::doing() {
  std::lock_guard<std::mutex> guard(mutex_);
  return now_;
}

// Memory -------------------------------------------------------------------------------------------------------------

Device::Device(int index) : index(index), size(settings.memory_bytes) {
  int file = memfd_create("emulated", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, off_t(size)) != 0) throw Error("no memory for an emulated device");
  void* forbidden = mmap(nullptr, size, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
  void* open = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (forbidden == MAP_FAILED || open == MAP_FAILED) throw Error("no address space for an emulated device");
  base = static_cast<char*>(forbidden);
  to_kernels = static_cast<char*>(open) - base;
  holes_[0] = size;
}

bool Device::carve(size_t wanted, size_t* offset) {
  for (auto& [begin, room] : holes_) {
    if (room < wanted) continue;
    *offset = begin;
    size_t rest = room - wanted, at = begin + wanted;
    holes_.erase(begin);
    if (rest > 0) holes_[at] = rest;
    return true;
  }
  return false;
}

void Device::give_back(size_t offset, size_t room) {
  auto next = holes_.lower_bound(offset);
  if (next != holes_.end() && offset + room == next->first) {
    room += next->second;
    next = holes_.erase(next);
  }
  if (next != holes_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += room;
      return;
    }
  }
  holes_[offset] = room;
}

void* Device::allocate(size_t bytes, Stream* stream) {
  TakesStack takes_stack;
  Guard guard(runtime().lock);
  size_t wanted = round_up(std::max<size_t>(bytes, 1), kRound);
  free_deferred();
  std::shared_ptr<Block> block;
  auto& ready = free_[{stream, wanted}];
  if (!ready.empty()) {
    block = ready.back();
    ready.pop_back();
  } else {
    size_t offset = 0;
    if (!carve(wanted, &offset)) {
      release_cache();
      if (!carve(wanted, &offset)) {
        ++stats.num_ooms;
        throw OutOfMemory("CUDA out of memory. Tried to allocate " + std::to_string(bytes >> 20) + " MiB. GPU " +
                          std::to_string(index) + " has a total capacity of " + std::to_string(size >> 20) +
                          " MiB of which " + std::to_string((size - stats.reserved) >> 20) + " MiB is free.");
      }
    }
    block = std::make_shared<Block>();
    block->device = index;
    block->offset = offset;
    block->size = wanted;
    block->stream = stream;
    blocks_[offset] = block;
    stats.reserved += wanted;
    stats.peak_reserved = std::max(stats.peak_reserved, stats.reserved);
    char* memory = base + offset;
    runtime().launch(stream, "new memory", {{memory, wanted, true}},
                     [at = memory + to_kernels, wanted] { memset(at, kPoison, wanted); });
  }
  block->requested = bytes;
  stats.requested += bytes;
  stats.allocated += wanted;
  stats.total_allocated += wanted;
  stats.peak = std::max(stats.peak, stats.allocated);
  ++stats.num_alloc;
  return base + block->offset;
}

void Device::put_away(const std::shared_ptr<Block>& block) {
  char* memory = base + block->offset;
  // What comes next in its stream comes after this; whatever else still reads it reads nan.
  runtime().launch(block->stream, "freed memory", {{memory, block->size, true}},
                   [at = memory + to_kernels, size = block->size] { memset(at, kPoison, size); });
  free_[{block->stream, block->size}].push_back(block);
}

void Device::release(void* pointer) {
  TakesStack takes_stack;
  Guard guard(runtime().lock);
  auto block = block_at(pointer);
  if (block == nullptr) return;
  stats.allocated -= block->size;
  stats.requested -= block->requested;
  ++stats.num_free;
  std::vector<MarkPtr> marks;
  for (Stream* stream : block->used_by) marks.push_back(stream->record());
  block->used_by.clear();
  if (marks.empty())
    put_away(block);
  else
    deferred_.emplace_back(block, std::move(marks));
}

void Device::free_deferred() {
  auto is_free = [](const std::pair<std::shared_ptr<Block>, std::vector<MarkPtr>>& entry) {
    return std::all_of(entry.second.begin(), entry.second.end(),
                       [](const MarkPtr& mark) { return mark->stream->is_over(mark->position); });
  };
  auto kept = std::stable_partition(deferred_.begin(), deferred_.end(), [&](auto& entry) { return !is_free(entry); });
  std::vector<std::pair<std::shared_ptr<Block>, std::vector<MarkPtr>>> over(kept, deferred_.end());
  deferred_.erase(kept, deferred_.end());
  for (auto& [block, marks] : over) {
    // The allocator has seen that these streams are over: what it hands out comes after them.
    for (const MarkPtr& mark : marks) runtime().join(block->stream->clock, mark->clock);
    put_away(block);
  }
}

void Device::record_use(void* pointer, Stream* stream) {
  Guard guard(runtime().lock);
  auto block = block_at(pointer);
  if (block == nullptr || block->stream == stream) return;
  auto& users = block->used_by;
  if (std::find(users.begin(), users.end(), stream) == users.end()) users.push_back(stream);
}

void Device::release_cache() {
  TakesStack takes_stack;
  Guard guard(runtime().lock);
  for (Stream* stream : runtime().streams_of(index)) stream->wait_on_host(stream->last());
  for (Stream* stream : runtime().streams_of(index)) {
    Clock over(stream->number + 1);
    over[stream->number] = stream->last();
    runtime().join(runtime().host_clock, over);
  }
  free_deferred();
  for (Stream* stream : runtime().streams_of(index)) stream->wait_on_host(stream->last());
  for (auto& [key, ready] : free_) {
    for (auto& block : ready) {
      stats.reserved -= block->size;
      blocks_.erase(block->offset);
      give_back(block->offset, block->size);
    }
    ready.clear();
  }
}

std::shared_ptr<Block> Device::block_at(const void* pointer) {
  size_t offset = size_t(static_cast<const char*>(pointer) - base);
  auto next = blocks_.upper_bound(offset);
  if (next == blocks_.begin()) return nullptr;
  auto& block = std::prev(next)->second;
  return offset < block->offset + block->size ? block : nullptr;
}

void Device::synchronize() {
  std::vector<MarkPtr> marks;
  for (Stream* stream : runtime().streams_of(index)) marks.push_back(stream->record());
  runtime().wait_on_host("synchronize device", marks);
  runtime().raise_error(index);
}

// The whole ----------------------------------------------------------------------------------------------------------

void Runtime::start() {
  Guard guard(lock);
  if (is_started_) return;
  began = std::chrono::steady_clock::now();
  streams_.resize(size_t(settings.num_devices));
  errors_.resize(size_t(settings.num_devices));
  for (int index = 0; index < settings.num_devices; ++index) devices.push_back(std::make_unique<Device>(index));
  is_started_ = true;
  for (int index = 0; index < settings.num_devices; ++index) new_stream(index);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before_us[0]);
  sigaction(SIGBUS, &action, &before_us[1]);
}

double Runtime::now_s() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

Stream* Runtime::new_stream(int device) {
  Guard guard(lock);
  auto& of_device = streams_.at(size_t(device));
  of_device.push_back(std::make_unique<Stream>(device, int(of_device.size()), num_streams_++));
  return of_device.back().get();
}

Stream* Runtime::stream(int device, int id) {
  Guard guard(lock);
  return streams_.at(size_t(device)).at(size_t(id)).get();
}

std::vector<Stream*> Runtime::streams_of(int device) {
  Guard guard(lock);
  std::vector<Stream*> found;
  for (auto& stream : streams_.at(size_t(device))) found.push_back(stream.get());
  return found;
}

Stream* Runtime::current_stream(int device) {
  this_streams.resize(devices.size());
  Stream* found = this_streams.at(size_t(device));
  return found != nullptr ? found : stream(device, 0);
}

Stream* Runtime::exchange_stream(Stream* stream) {
  Stream* before = current_stream(stream->device);
  this_streams[size_t(stream->device)] = stream;
  return before;
}

int Runtime::current_device() { return this_device; }

int Runtime::exchange_device(int device) {
  if (device < 0 || device >= settings.num_devices) throw Error("CUDA error: invalid device ordinal");
  std::swap(this_device, device);
  return device;
}

void Runtime::join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t at = 0; at < other.size(); ++at) clock[at] = std::max(clock[at], other[at]);
}

void Runtime::count_wait(const char* kind) {
  std::string line = line_of_program ? line_of_program() : "";
  Guard guard(lock);
  ++counters.host_waits[std::string(kind) + " at " + line];
}

void Runtime::count_bytes(uint64_t Counters::*which, size_t bytes) {
  Guard guard(lock);
  counters.*which += bytes;
}

void Runtime::wait_on_host(const char* kind, const std::vector<MarkPtr>& marks) {
  count_wait(kind);
  auto wait = [&] {
    for (const MarkPtr& mark : marks) mark->stream->wait_on_host(mark->position);
  };
  if (without_interpreter_lock)
    without_interpreter_lock(wait);
  else
    wait();
  Guard guard(lock);
  for (const MarkPtr& mark : marks) join(host_clock, mark->clock);
}

Position Runtime::launch(Stream* stream, std::string name, const std::vector<Span>& spans, std::function<void()> work) {
  TakesStack takes_stack;
  std::shared_ptr<Stack> stack = stack_of_call;
  Guard guard(lock);
  ++counters.launches[name];
  Position position = stream->launch(name, std::move(work));
  join(stream->clock, host_clock);
  if (stream->clock.size() <= stream->number) stream->clock.resize(stream->number + 1);
  stream->clock[stream->number] = position;
  if (!settings.check_order) return position;
  for (const Span& span : spans) {
    Device* device = device_of(span.pointer);
    if (device == nullptr || span.bytes == 0) continue;
    auto block = device->block_at(span.pointer);
    if (block == nullptr) continue;
    size_t begin = size_t(static_cast<const char*>(span.pointer) - device->base) - block->offset;
    check_order(*block, {begin, begin + span.bytes, span.is_write, stream, position, name, stack});
  }
  return position;
}

void Runtime::check_order(Block& block, const Access& access) {
  std::vector<Access> kept;
  for (Access& before : block.accesses) {
    bool overlaps = before.begin < access.end && access.begin < before.end;
    const Clock& clock = access.stream->clock;
    bool is_before = before.stream == access.stream ||
                     (clock.size() > before.stream->number && clock[before.stream->number] >= before.position);
    if (overlaps && !is_before && (before.is_write || access.is_write)) {
      if (races_.size() < kMostRaces) races_.push_back({before, access, block.device});
    }
    // An access that the new one comes after says nothing more, if the new one covers it: all that comes after the
    // new one comes after both.
    bool is_covered = is_before && access.begin <= before.begin && before.end <= access.end &&
                      (access.is_write || (!before.is_write && before.stream == access.stream));
    if (!is_covered) kept.push_back(std::move(before));
  }
  kept.push_back(access);
  block.accesses = std::move(kept);
}

std::vector<std::string> Runtime::take_races() {
  std::vector<Race> found;
  {
    Guard guard(lock);
    found.swap(races_);
  }
  std::vector<std::string> texts;  // written without the lock: stacks are Python's
  for (const Race& race : found) {
    auto describe = [](const Access& one) {
      return std::string(one.is_write ? "written" : "read") + " by " + one.name + " (stream " +
             std::to_string(one.stream->id) + " of device " + std::to_string(one.stream->device) + ", position " +
             std::to_string(one.position) + ")\n" + (one.stack ? one.stack->text() : "");
    };
    texts.push_back("no event orders two accesses to memory of device " + std::to_string(race.device) + ":\n" +
                    describe(race.before) + "and " + describe(race.after));
  }
  return texts;
}

void Runtime::fail(int device, const std::string& message) {
  Guard guard(lock);
  if (errors_.at(size_t(device)).empty()) errors_[size_t(device)] = message;
}

void Runtime::raise_error(int device) {
  Guard guard(lock);
  if (!errors_.at(size_t(device)).empty())
    throw Error("CUDA error: a kernel of device " + std::to_string(device) + " failed: " + errors_[size_t(device)]);
}

void Runtime::forget_errors() {
  Guard guard(lock);
  for (auto& error : errors_) error.clear();
}

Device* Runtime::device_of(const void* pointer) {
  for (auto& device : devices)
    if (device->contains(pointer)) return device.get();
  return nullptr;
}

// Pinned memory ------------------------------------------------------------------------------------------------------

void* Runtime::pinned_allocate(size_t bytes) {
  Guard guard(lock);
  size_t wanted = round_up(std::max<size_t>(bytes, 1), 4096);
  for (auto& [at, pinned] : pinned_) {
    if (!pinned.is_free || pinned.size != wanted) continue;
    bool is_over = true;
    for (const MarkPtr& mark : pinned.marks) is_over = is_over && mark->stream->is_over(mark->position);
    if (!is_over) continue;
    pinned.is_free = false;
    pinned.marks.clear();
    memset(const_cast<char*>(at), kPoison, wanted);
    return const_cast<char*>(at);
  }
  void* memory = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw OutOfMemory("no pinned memory");
  memset(memory, kPoison, wanted);
  pinned_[static_cast<const char*>(memory)] = {wanted, {}, false};
  return memory;
}

void Runtime::pinned_release(void* pointer) {
  Guard guard(lock);
  auto found = pinned_.find(static_cast<const char*>(pointer));
  if (found != pinned_.end()) found->second.is_free = true;
}

bool Runtime::is_pinned(const void* pointer) {
  Guard guard(lock);
  auto next = pinned_.upper_bound(static_cast<const char*>(pointer));
  if (next == pinned_.begin()) return false;
  auto& [at, pinned] = *std::prev(next);
  return pointer < at + pinned.size && !pinned.is_free;
}

void Runtime::pinned_record_use(const void* pointer, Stream* stream) {
  Guard guard(lock);
  auto next = pinned_.upper_bound(static_cast<const char*>(pointer));
  if (next == pinned_.begin()) return;
  auto& [at, pinned] = *std::prev(next);
  if (pointer < at + pinned.size) pinned.marks.push_back(stream->record());
}

}  // namespace emulated
