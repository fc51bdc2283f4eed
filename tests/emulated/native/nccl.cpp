// A process group that torch takes for NCCL, between processes of one machine.
//
//   communicator   the ranks of one pair, or all of a group; a stream of its own on which its operations stand in order
//   first use      makes the communicator: the host blocks until the others come to it, too
//   operation      a kernel that occupies the stream until the peer has come to its own; there are no tags
//   error          comes later, by the work, or by the device where a kernel waited past its deadline
//
// Two ranks on one device are refused, as NCCL does.
#include <poll.h>
#include <pybind11/chrono.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"

namespace emulated {
namespace {

using Clock_ = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;

struct Aborted : std::exception {};

// Ranks that are connected, and the stream of their operations.
class Communicator {
 public:
  Communicator(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank,
               const std::vector<int>& ranks, int device, double limit_s)
      : name(name), rank(rank), ranks(ranks), device(device), stream(runtime().new_stream(device)), limit_s_(limit_s) {
    Clock_::time_point until = after(limit_s);
    for (int peer : ranks) {
      if (peer == rank) continue;
      std::string key = name + "/" + std::to_string(std::min(rank, peer)) + "-" + std::to_string(std::max(rank, peer));
      sockets_[peer] = rank < peer ? listen_for(store, key, until) : connect_to(store, key, until);
      exchange_identity(peer, until);
    }
  }
  ~Communicator() {
    for (auto& [peer, socket] : sockets_) close(socket);
  }

  const std::string name;
  const int rank;
  const std::vector<int> ranks;
  const int device;
  Stream* const stream;

  void abort() {
    is_aborted_ = true;
    for (auto& [peer, socket] : sockets_) shutdown(socket, SHUT_RDWR);
  }
  bool is_aborted() const { return is_aborted_; }
  std::string error() {
    std::lock_guard<std::mutex> guard(mutex_);
    return error_;
  }

  // Both ends say what they are about to do, and then the bytes go one way.
  void send(int peer, const void* bytes, size_t size) {
    meet(peer, 's', size);
    write_all(peer, bytes, size);
    char over = 0;
    read_all(peer, &over, 1);
  }
  void receive(int peer, void* bytes, size_t size) {
    meet(peer, 'r', size);
    read_all(peer, bytes, size);
    char over = 1;
    write_all(peer, &over, 1);
  }

  // Of each rank the same number of bytes, by their order.
  std::vector<std::string> gather(const void* bytes, size_t size) {
    std::vector<std::string> found;
    for (int peer : ranks) {
      if (peer == rank) {
        found.emplace_back(static_cast<const char*>(bytes), size);
        continue;
      }
      found.emplace_back(size, '\0');
      if (rank < peer) send(peer, bytes, size);
      receive(peer, found.back().data(), size);
      if (rank > peer) send(peer, bytes, size);
    }
    return found;
  }

  // Runs an operation's transfers in its stream: an abort ends them, whatever they have done so far.
  void run(const std::string& what, const std::function<void()>& transfers) {
    if (is_aborted_) return;
    until_ = after(limit_s_);
    try {
      transfers();
    } catch (const Aborted&) {
    } catch (const std::exception& failure) {
      {
        std::lock_guard<std::mutex> guard(mutex_);
        if (error_.empty()) error_ = what + ": " + failure.what();
      }
      stay_until_aborted();  // as a kernel does whose peer is lost: only an abort ends it, or here the deadline
      if (!is_aborted_) throw;
    }
  }

 private:
  static sockaddr_un address_of(const std::string& name, socklen_t* size) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path + 1, name.data(), name.size());  // an abstract name: nothing is left on disk
    *size = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return address;
  }
  static Clock_::time_point after(double seconds) {
    return Clock_::now() + std::chrono::duration_cast<Clock_::duration>(std::chrono::duration<double>(seconds));
  }
  static int left_ms(Clock_::time_point until) {
    return int(std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock_::now()).count()));
  }

  static int listen_for(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key, Clock_::time_point until) {
    static std::atomic<int> count{0};
    std::string name = "emulated-nccl-" + std::to_string(getpid()) + "-" + std::to_string(count++);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t size = 0;
    sockaddr_un address = address_of(name, &size);
    TORCH_CHECK(listener >= 0 && bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(listener, 1) == 0,
                "NCCL error: no socket");
    store->set(key, name);
    pollfd waited{listener, POLLIN, 0};
    bool has_come = poll(&waited, 1, left_ms(until)) > 0;
    int found = has_come ? accept4(listener, nullptr, nullptr, SOCK_CLOEXEC) : -1;
    close(listener);
    TORCH_CHECK(found >= 0, "NCCL error: the other rank has not come to the first use of communicator ", key);
    return found;
  }
  static int connect_to(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key, Clock_::time_point until) {
    store->wait({key}, std::chrono::milliseconds(left_ms(until) + 1));
    std::string name = store->get_to_str(key);
    int found = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t size = 0;
    sockaddr_un address = address_of(name, &size);
    TORCH_CHECK(found >= 0 && connect(found, reinterpret_cast<sockaddr*>(&address), size) == 0,
                "NCCL error: the other rank has gone from communicator ", key);
    return found;
  }

  // A device of a machine is one device for all processes of that machine.
  void exchange_identity(int peer, Clock_::time_point until) {
    until_ = until;
    char mine[64] = {}, theirs[64] = {};
    const char* machine = getenv("EMULATED_MACHINE");
    snprintf(mine, sizeof mine, "device %d of machine %s", device, machine == nullptr ? "0" : machine);
    write_all(peer, mine, sizeof mine);
    read_all(peer, theirs, sizeof theirs);
    TORCH_CHECK(strcmp(mine, theirs) != 0, "NCCL error: Duplicate GPU detected : rank ", rank, " and rank ", peer,
                " both on ", mine);
  }

  void meet(int peer, char kind, size_t size) {
    struct Header {
      char kind;
      uint64_t size;
    } mine{kind, size}, theirs{};
    write_all(peer, &mine, sizeof mine);
    read_all(peer, &theirs, sizeof theirs);
    if (theirs.kind == kind)
      throw Error("both ranks " + std::string(kind == 's' ? "send" : "receive") + " at this place of their order");
    if (theirs.size != size)
      throw Error("this rank has " + std::to_string(size) + " bytes, rank " + std::to_string(peer) + " has " +
                  std::to_string(theirs.size));
  }

  void await(int peer, short what) {
    pollfd waited{sockets_.at(peer), what, 0};
    int found = poll(&waited, 1, left_ms(until_));
    if (is_aborted_) throw Aborted();
    if (found == 0) throw Error("the peer, rank " + std::to_string(peer) + ", has not come in time");
  }
  void write_all(int peer, const void* bytes, size_t size) {
    for (size_t at = 0; at < size;) {
      await(peer, POLLOUT);
      ssize_t done = ::send(sockets_.at(peer), static_cast<const char*>(bytes) + at, size - at, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (done > 0) at += size_t(done);
      if (done < 0 && errno != EAGAIN && errno != EINTR) lost(peer);
    }
  }
  void read_all(int peer, void* bytes, size_t size) {
    for (size_t at = 0; at < size;) {
      await(peer, POLLIN);
      ssize_t done = recv(sockets_.at(peer), static_cast<char*>(bytes) + at, size - at, MSG_DONTWAIT);
      if (done > 0) at += size_t(done);
      if (done == 0 || (done < 0 && errno != EAGAIN && errno != EINTR)) lost(peer);
    }
  }
  void lost(int peer) {
    if (is_aborted_) throw Aborted();
    throw Error("remote process exited or there was a network error (rank " + std::to_string(peer) + ")");
  }
  void stay_until_aborted() {
    int any = sockets_.begin()->second;
    pollfd waited{any, 0, 0};  // a shutdown of this end is all that wakes it, if the peer is still there
    while (!is_aborted_ && left_ms(until_) > 0) {
      int found = poll(&waited, 1, std::min(left_ms(until_), 20));
      if (found > 0) poll(nullptr, 0, std::min(left_ms(until_), 20));
    }
  }

  std::map<int, int> sockets_;
  std::atomic<bool> is_aborted_{false};
  std::mutex mutex_;
  std::string error_;
  double limit_s_;
  Clock_::time_point until_;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

class NcclWork final : public c10d::Work {
 public:
  NcclWork(int rank, c10d::OpType type, CommunicatorPtr communicator, MarkPtr end, Tensors kept)
      : Work(rank, type), communicator_(std::move(communicator)), end_(std::move(end)), kept_(std::move(kept)) {}

  bool isCompleted() override {
    if (!end_->stream->is_over(end_->position)) return !communicator_->error().empty();
    std::lock_guard<std::recursive_mutex> guard(runtime().lock);
    runtime().join(runtime().host_clock, end_->clock);
    return true;
  }
  bool isSuccess() const override { return communicator_->error().empty() && end_->stream->is_over(end_->position); }
  std::exception_ptr exception() const override {
    std::string error = communicator_->error();
    return error.empty() ? nullptr : std::make_exception_ptr(std::runtime_error("NCCL error: " + error));
  }
  std::vector<at::Tensor> result() override { return kept_; }
  // The current stream waits, and the host does not.
  void synchronize() override {
    runtime().current_stream(communicator_->device)->wait_for(end_);
    kept_.clear();  // from now on the stream that has waited answers for this memory
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void abort() override { communicator_->abort(); }

 private:
  CommunicatorPtr communicator_;
  MarkPtr end_;
  Tensors kept_;
};

class ProcessGroupNccl;
std::mutex groups_mutex;
std::set<ProcessGroupNccl*> groups;

class ProcessGroupNccl final : public c10d::Backend {
 public:
  ProcessGroupNccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options)
      : Backend(rank, size), store_(std::move(store)), options_(std::move(options)) {
    std::lock_guard<std::mutex> guard(groups_mutex);
    groups.insert(this);
  }
  ~ProcessGroupNccl() override {
    std::lock_guard<std::mutex> guard(groups_mutex);
    groups.erase(this);
  }
  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void eagerConnectSingleDevice(at::Device device) override { communicator(device.index(), all()); }

  void abort() override {
    std::lock_guard<std::mutex> guard(mutex_);
    is_aborted_ = true;
    for (auto& [key, communicator] : communicators_) communicator->abort();
  }
  void shutdown() override { abort(); }

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int peer, int) override {
    at::Tensor tensor = checked(tensors);
    auto found = communicator(tensor.get_device(), {std::min(rank_, peer), std::max(rank_, peer)});
    return start(c10d::OpType::SEND, "nccl send to rank " + std::to_string(peer), found, {tensor}, {}, [=, from = for_kernel(tensor)] {
      found->send(peer, from.data_ptr(), from.nbytes());
    });
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int peer, int) override {
    at::Tensor tensor = checked(tensors);
    auto found = communicator(tensor.get_device(), {std::min(rank_, peer), std::max(rank_, peer)});
    return start(c10d::OpType::RECV, "nccl receive from rank " + std::to_string(peer), found, {}, {tensor}, [=, to = for_kernel(tensor)] {
      found->receive(peer, to.data_ptr(), to.nbytes());
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    at::Tensor tensor = checked(tensors);
    auto found = communicator(tensor.get_device(), all());
    int root = int(options.rootRank);
    return start(c10d::OpType::BROADCAST, "nccl broadcast", found, {}, {tensor}, [=, to = for_kernel(tensor)] {
      if (found->rank != root) return found->receive(root, to.data_ptr(), to.nbytes());
      for (int peer : found->ranks)
        if (peer != root) found->send(peer, to.data_ptr(), to.nbytes());
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    at::Tensor tensor = checked(tensors);
    auto found = communicator(tensor.get_device(), all());
    auto reduction = options.reduceOp.op_;
    return start(c10d::OpType::ALLREDUCE, "nccl allreduce", found, {}, {tensor}, [=, to = for_kernel(tensor)] {
      auto parts = found->gather(to.data_ptr(), to.nbytes());
      for (size_t at = 0; at < parts.size(); ++at) {
        at::Tensor part = at::from_blob(parts[at].data(), to.sizes(), to.options());
        if (at == 0)
          to.copy_(part);
        else if (reduction == c10d::ReduceOp::MAX)
          to.copy_(at::maximum(to, part));
        else if (reduction == c10d::ReduceOp::MIN)
          to.copy_(at::minimum(to, part));
        else
          to.add_(part);
      }
      if (reduction == c10d::ReduceOp::AVG) to.div_(int64_t(parts.size()));
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    Tensors both = {input};
    checked(both);
    auto found = communicator(input.get_device(), all());
    return start(c10d::OpType::_ALLGATHER_BASE, "nccl allgather", found, {input}, {output},
                 [=, to = for_kernel(output), from = for_kernel(input)] {
                   char* at = static_cast<char*>(to.data_ptr());
                   for (const std::string& part : found->gather(from.data_ptr(), from.nbytes())) {
                     memcpy(at, part.data(), part.size());
                     at += part.size();
                   }
                 });
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions&) override {
    at::Tensor input = checked(inputs);
    auto found = communicator(input.get_device(), all());
    Tensors to;
    for (const at::Tensor& output : outputs.at(0)) to.push_back(for_kernel(output));
    return start(c10d::OpType::ALLGATHER, "nccl allgather", found, {input}, outputs.at(0),
                 [=, from = for_kernel(input)] {
                   auto parts = found->gather(from.data_ptr(), from.nbytes());
                   for (size_t at = 0; at < parts.size(); ++at)
                     memcpy(to.at(at).data_ptr(), parts[at].data(), parts[at].size());
                 });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    Tensors tensors = {at::zeros({1}, at::TensorOptions().device(device_type))};
    auto work = allreduce(tensors, {});
    work->wait();
    runtime().wait_on_host("barrier", {runtime().current_stream(tensors[0].get_device())->record()});
    return work;
  }

 private:
  std::vector<int> all() const {
    std::vector<int> found(size_t(getSize()), 0);
    for (size_t at = 0; at < found.size(); ++at) found[at] = int(at);
    return found;
  }

  static at::Tensor checked(const Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "NCCL takes one tensor at a time");
    TORCH_CHECK(tensors[0].device().type() == device_type, "No backend type associated with device type ",
                tensors[0].device().type(), ": Tensors must be CUDA and dense");
    TORCH_CHECK(tensors[0].is_non_overlapping_and_dense(), "Tensors must be contiguous");
    return tensors[0];
  }

  // Made by its first use, which blocks the host until the other ranks come to theirs.
  CommunicatorPtr communicator(int device, const std::vector<int>& ranks) {
    std::string key = "device " + std::to_string(device);
    for (int rank : ranks) key += " " + std::to_string(rank);
    {
      std::lock_guard<std::mutex> guard(mutex_);
      TORCH_CHECK(!is_aborted_, "NCCL error: the communicator was aborted");
      auto known = communicators_.find(key);
      if (known != communicators_.end()) return known->second;
    }
    runtime().count_wait("first use of a communicator");
    std::string name = "communicator";
    for (int rank : ranks) name += " " + std::to_string(rank);
    {
      std::lock_guard<std::mutex> guard(mutex_);
      name += ", number " + std::to_string(made_of_[name]++);
    }
    double limit_s = std::min(settings.deadline_s, double(options_->timeout.count()) / 1e3);
    auto made = std::make_shared<Communicator>(store_, name, rank_, ranks, device, limit_s);
    std::lock_guard<std::mutex> guard(mutex_);
    if (is_aborted_) made->abort();
    return communicators_[key] = made;
  }

  c10::intrusive_ptr<c10d::Work> start(c10d::OpType type, const std::string& name, const CommunicatorPtr& found,
                                       const Tensors& read, const Tensors& written, std::function<void()> transfers) {
    std::vector<Runtime::Span> spans;
    Tensors kept;
    for (const at::Tensor& tensor : read) spans.push_back(span_of(tensor, false)), kept.push_back(tensor);
    for (const at::Tensor& tensor : written) spans.push_back(span_of(tensor, true)), kept.push_back(tensor);
    found->stream->wait_for(runtime().current_stream(found->device)->record());
    runtime().launch(found->stream, name, spans,
                     [found, name, transfers = std::move(transfers)] { found->run(name, transfers); });
    return c10::make_intrusive<NcclWork>(rank_, type, found, found->stream->record(), kept);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<Options> options_;
  std::mutex mutex_;
  bool is_aborted_ = false;
  std::map<std::string, int> made_of_;  // how many communicators of the same ranks there are, one for each device
  std::map<std::string, CommunicatorPtr> communicators_;
};

}  // namespace

void abort_all_communicators() {
  std::lock_guard<std::mutex> guard(groups_mutex);
  for (ProcessGroupNccl* group : groups) group->abort();
}

void bind_nccl(py::module_ module) {
  using c10d::Backend;
  struct NcclOptions final : Backend::Options {
    explicit NcclOptions(bool is_high_priority) : Options("nccl"), is_high_priority_stream(is_high_priority) {}
    bool is_high_priority_stream;
  };
  auto kind = py::class_<ProcessGroupNccl, Backend, c10::intrusive_ptr<ProcessGroupNccl>>(module, "ProcessGroupNCCL");
  py::class_<NcclOptions, Backend::Options, c10::intrusive_ptr<NcclOptions>>(kind, "Options")
      .def(py::init([](bool is_high_priority) { return c10::make_intrusive<NcclOptions>(is_high_priority); }),
           py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &NcclOptions::is_high_priority_stream);
  kind.def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       const c10::intrusive_ptr<NcclOptions>& options) {
             return c10::make_intrusive<ProcessGroupNccl>(store, rank, size, options);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds limit) {
             auto options = c10::make_intrusive<NcclOptions>(false);
             options->timeout = limit;
             return c10::make_intrusive<ProcessGroupNccl>(store, rank, size, options);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout") = std::chrono::milliseconds(600000));
}

}  // namespace emulated
