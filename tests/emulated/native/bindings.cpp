// What Python reaches of the emulated accelerator.
#include <fstream>
#include <thread>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"

namespace py = pybind11;

namespace emulated {

void bind_nccl(py::module_ module);
void abort_all_communicators();

namespace {

struct PythonStack final : Stack {
  std::shared_ptr<torch::CapturedTraceback> captured;
  std::string text() const override {
    auto found = torch::symbolize({captured.get()});
    std::string text;
    int left = 12;
    for (uint64_t at : found.tracebacks.at(0)) {
      if (left-- == 0) break;
      const auto& frame = found.all_frames[at];
      text += "    " + frame.filename + ":" + std::to_string(frame.lineno) + " " + frame.funcname + "\n";
    }
    return text;
  }
};

std::shared_ptr<Stack> take_python_stack() {
  if (!Py_IsInitialized()) return nullptr;
  auto found = std::make_shared<PythonStack>();
  found->captured = torch::CapturedTraceback::gather(true, false, false);
  return found;
}

// The innermost line that belongs neither to torch nor to the emulation.
std::string line_in_python() {
  if (!Py_IsInitialized()) return "";
  py::gil_scoped_acquire gil;
  std::string first;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    std::string file = py::cast<std::string>(py::handle(code->co_filename));
    std::string line = file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
    if (first.empty()) first = line;
    if (file.find("/torch/") == std::string::npos && file.find("emulated/torch_half") == std::string::npos) {
      Py_XDECREF(frame);
      return line;
    }
  }
  return first.empty() ? "a thread without Python" : first;
}

void release_gil_and(const std::function<void()>& wait) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    py::gil_scoped_release release;
    wait();
  } else {
    wait();
  }
}

void start(const std::string& kind, const py::dict& given) {
  settings.num_devices = given["num_devices"].cast<int>();
  settings.memory_bytes = given["memory_bytes"].cast<size_t>();
  settings.lag_us = given["lag_us"].cast<int>();
  settings.lag_every = given["lag_every"].cast<int>();
  settings.seed = given["seed"].cast<uint64_t>();
  settings.deadline_s = given["deadline_s"].cast<double>();
  settings.check_order = given["check_order"].cast<bool>();
  if (kind != "cuda") {
    device_type = c10::DeviceType::PrivateUse1;
    dispatch_key = c10::DispatchKey::PrivateUse1;
  }
  take_stack = take_python_stack;
  line_of_program = line_in_python;
  without_interpreter_lock = release_gil_and;
  runtime().start();
  register_backend();
  register_kernels();
}

py::tuple as_tuple(Stream* stream) { return py::make_tuple(stream->id, stream->device, int(device_type)); }

py::dict counters() {
  std::lock_guard<std::recursive_mutex> guard(runtime().lock);
  const Counters& found = runtime().counters;
  py::dict result;
  result["host_waits"] = py::cast(found.host_waits);
  result["launches"] = py::cast(found.launches);
  result["bytes_to_device"] = found.bytes_to_device;
  result["bytes_to_host"] = found.bytes_to_host;
  result["bytes_between_devices"] = found.bytes_between_devices;
  return result;
}

}  // namespace
}  // namespace emulated

PYBIND11_MODULE(emulated_accelerator, module) {
  using namespace emulated;
  module.def("start", start);
  module.def("device_count", [] { return runtime().devices.size(); });
  module.def("current_device", [] { return runtime().current_device(); });
  module.def("exchange_device", [](int index) { return runtime().exchange_device(index); });
  module.def("current_stream", [](int index) {
    return as_tuple(runtime().current_stream(index < 0 ? runtime().current_device() : index));
  });
  module.def("default_stream", [](int index) {
    return as_tuple(runtime().stream(index < 0 ? runtime().current_device() : index, 0));
  });
  module.def("set_stream", [](int id, int index) {
    runtime().exchange_device(index);
    runtime().exchange_stream(runtime().stream(index, id));
  });
  module.def("synchronize", [](int index) {
    runtime().devices.at(size_t(index < 0 ? runtime().current_device() : index))->synchronize();
  });
  module.def("default_generator", [](int index) { return default_generator(c10::DeviceIndex(index)); });
  module.def("empty_cache", [] {
    release_gil_and([] { allocator()->emptyCache(); });
  });
  module.def("memory_stats", [](int index) {
    std::lock_guard<std::recursive_mutex> guard(runtime().lock);
    const MemoryStats& stats = runtime().devices.at(size_t(index))->stats;
    py::dict found;
    found["allocated"] = stats.allocated;
    found["peak"] = stats.peak;
    found["requested"] = stats.requested;
    found["reserved"] = stats.reserved;
    found["peak_reserved"] = stats.peak_reserved;
    found["num_alloc"] = stats.num_alloc;
    found["num_free"] = stats.num_free;
    found["num_ooms"] = stats.num_ooms;
    return found;
  });
  module.def("reset_peak", [](int index) { allocator()->resetPeakStats(c10::DeviceIndex(index)); });
  module.def("memory_info", [](int index) { return allocator()->getMemoryInfo(c10::DeviceIndex(index)); });
  module.def("set_storage_bytes", [](const at::Tensor& tensor, size_t bytes) { grow_storage(tensor.storage(), bytes); });
  // Occupies the current stream for a time, as torch.cuda._sleep does.
  module.def("occupy", [](double seconds) {
    Stream* stream = runtime().current_stream(runtime().current_device());
    runtime().launch(stream, "occupy", {}, [seconds] {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    });
  });
  module.def("elapsed_ms", [](intptr_t from, intptr_t to) {
    return elapsed_ms(reinterpret_cast<void*>(from), reinterpret_cast<void*>(to));
  });
  module.def("counters", counters);
  module.def("reset_counters", [] {
    std::lock_guard<std::recursive_mutex> guard(runtime().lock);
    runtime().counters = {};
  });
  // Written here, because a program may have put something of its own in the place of Python's open().
  module.def("write_file", [](const std::string& path, const std::string& text) {
    std::ofstream(path) << text;
  });
  module.def("take_races", [] { return runtime().take_races(); });
  module.def("bind_nccl", bind_nccl);
  module.def("abort_all_communicators", abort_all_communicators);
  module.def("forget_errors", [] { runtime().forget_errors(); });
  module.def("set_lag", [](int lag_us, int lag_every) {
    settings.lag_us = lag_us;
    settings.lag_every = lag_every;
  });
  module.def("doing", [](int index) {
    std::vector<std::string> found;
    for (Stream* stream : runtime().streams_of(index)) found.push_back(stream->doing());
    return found;
  });
}
