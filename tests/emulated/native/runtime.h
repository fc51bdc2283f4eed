// A machine with accelerators, emulated by threads: memory, streams, events, and an allocator that hands out again.
//
//   device     an arena of memory, mapped twice: where tensors point, which nobody may touch (PROT_NONE), and a second
//              time at a fixed distance, where kernels read and write
//   stream     a thread and a queue; before some items it waits for a drawn time, as a busy device would
//   position   number of an item in its stream; an event is a (stream, position)
//   clock      for each stream the position that is known to be over: of a stream (what its next item comes after) and
//              of the host (what it has waited for)
//   block      memory that the allocator has handed out, with the accesses to it that may still matter
//
// This half knows nothing of torch.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulated {

using Position = uint64_t;
using Clock = std::vector<Position>;  // by the number of the stream

struct Settings {
  int num_devices = 2;
  size_t memory_bytes = size_t{2} << 30;
  int lag_us = 300;       // the longest time for which a stream waits before an item
  int lag_every = 16;     // one item in so many is held up
  uint64_t seed = 0;
  double deadline_s = 60;
  bool check_order = true;  // whether accesses are checked for an order
};

extern Settings settings;

// What the two halves ask of Python: where a program is now. Set by the half that knows Python.
struct Stack {
  virtual ~Stack() = default;
  virtual std::string text() const = 0;
};
extern std::function<std::shared_ptr<Stack>()> take_stack;
extern std::function<std::string()> line_of_program;
// Waits with the interpreter's lock released, if this thread holds it.
extern std::function<void(const std::function<void()>&)> without_interpreter_lock;

struct Error : std::exception {
  std::string message;
  explicit Error(std::string text) : message(std::move(text)) {}
  const char* what() const noexcept override { return message.c_str(); }
};

struct OutOfMemory : Error {
  using Error::Error;
};

class Stream;

struct Mark {  // a position of a stream, and when it was reached
  Stream* stream = nullptr;
  Position position = 0;
  Clock clock;
  std::atomic<double> time_s{-1};
};
using MarkPtr = std::shared_ptr<Mark>;

class Stream {
 public:
  Stream(int device, int id, size_t number);
  const int device;
  const int id;         // within its device; 0 is the default stream
  const size_t number;  // within the process

  // Adds work to the queue, and returns its position.
  Position launch(std::string name, std::function<void()> work);
  MarkPtr record();
  void wait_for(const MarkPtr& mark);  // what comes after waits for the mark
  bool is_over(Position position) const { return done_.load() >= position; }
  Position last() const { return launched_.load(); }
  // Blocks this thread, until the position is over or the deadline has come.
  void wait_on_host(Position position);
  std::string doing();

  Clock clock;  // under the runtime's lock

 private:
  void run();
  void loop();
  struct Item {
    std::string name;
    std::function<void()> work;
    bool is_mark;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  std::atomic<Position> launched_{0};
  std::atomic<Position> done_{0};
  std::string now_;
  std::mt19937_64 draws_;
  bool is_started_ = false;
};

struct Access {
  size_t begin, end;  // bytes of the block
  bool is_write;
  Stream* stream;
  Position position;
  std::string name;
  std::shared_ptr<Stack> stack;
};

struct Block {
  int device = 0;
  size_t offset = 0, size = 0, requested = 0;
  Stream* stream = nullptr;
  std::vector<Stream*> used_by;
  std::vector<Access> accesses;
};

struct MemoryStats {
  size_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0, requested = 0;
  size_t num_alloc = 0, num_free = 0, num_ooms = 0, total_allocated = 0;
};

class Device {
 public:
  explicit Device(int index);
  const int index;
  char* base = nullptr;           // where tensors point: nobody may touch it
  std::ptrdiff_t to_kernels = 0;  // added to a pointer, where kernels find the memory
  size_t size = 0;

  void* allocate(size_t bytes, Stream* stream);
  void release(void* pointer);
  void record_use(void* pointer, Stream* stream);
  void release_cache();
  bool contains(const void* pointer) const {
    return pointer >= base && pointer < base + size;
  }
  std::shared_ptr<Block> block_at(const void* pointer);
  MemoryStats stats;  // under the runtime's lock
  void synchronize();

 private:
  void free_deferred();
  void put_away(const std::shared_ptr<Block>& block);
  bool carve(size_t size, size_t* offset);
  void give_back(size_t offset, size_t size);
  std::map<size_t, size_t> holes_;                              // size of free memory by its offset
  std::map<size_t, std::shared_ptr<Block>> blocks_;             // by offset
  std::map<std::pair<Stream*, size_t>, std::vector<std::shared_ptr<Block>>> free_;  // by stream and size
  std::vector<std::pair<std::shared_ptr<Block>, std::vector<MarkPtr>>> deferred_;
};

struct Counters {
  std::map<std::string, uint64_t> host_waits;  // by kind and line of the program
  uint64_t bytes_to_device = 0, bytes_to_host = 0, bytes_between_devices = 0;
  std::map<std::string, uint64_t> launches;  // by name
};

class Runtime {
 public:
  void start();
  bool is_started() const { return is_started_; }
  std::vector<std::unique_ptr<Device>> devices;

  Stream* stream(int device, int id);
  Stream* new_stream(int device);
  Stream* current_stream(int device);
  Stream* exchange_stream(Stream* stream);
  int current_device();
  int exchange_device(int device);
  std::vector<Stream*> streams_of(int device);

  // What the host waits for, counted with the line of the program.
  void wait_on_host(const char* kind, const std::vector<MarkPtr>& marks);
  void count_wait(const char* kind);
  void count_bytes(uint64_t Counters::*which, size_t bytes);

  // Work on a device, with the memory that it reads and writes.
  struct Span {
    const void* pointer;
    size_t bytes;
    bool is_write;
  };
  Position launch(Stream* stream, std::string name, const std::vector<Span>& spans, std::function<void()> work);

  // Errors of kernels come to the host at its next wait, and stay.
  void fail(int device, const std::string& message);
  void raise_error(int device);
  void forget_errors();

  // Host memory that devices may read and write by themselves.
  void* pinned_allocate(size_t bytes);
  void pinned_release(void* pointer);
  bool is_pinned(const void* pointer);
  void pinned_record_use(const void* pointer, Stream* stream);

  Device* device_of(const void* pointer);
  template <class T>
  T* for_kernels(T* pointer) {
    Device* device = device_of(pointer);
    return device == nullptr ? pointer : (T*)((char*)pointer + device->to_kernels);
  }

  std::recursive_mutex lock;  // clocks, blocks, counters
  Counters counters;
  // The races since the last call, as texts; the interpreter's lock is held.
  std::vector<std::string> take_races();
  Clock host_clock;
  void join(Clock& clock, const Clock& other);
  double now_s() const;
  std::chrono::steady_clock::time_point began;

 private:
  void check_order(Block& block, const Access& access);
  struct Race {
    Access before, after;
    int device;
  };
  std::vector<Race> races_;
  bool is_started_ = false;
  std::vector<std::vector<std::unique_ptr<Stream>>> streams_;  // by device and id
  size_t num_streams_ = 0;
  std::vector<std::string> errors_;  // by device
  struct Pinned {
    size_t size;
    std::vector<MarkPtr> marks;
    bool is_free;
  };
  std::map<const char*, Pinned> pinned_;
  friend class Device;
};

Runtime& runtime();

}  // namespace emulated
