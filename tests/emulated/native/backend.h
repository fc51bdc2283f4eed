// What the parts that know torch share.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Storage.h>

#include "runtime.h"

namespace emulated {

// CUDA, or PrivateUse1 where the accelerator goes by a name of its own.
extern c10::DeviceType device_type;
extern c10::DispatchKey dispatch_key;

c10::DeviceAllocator* allocator();
const at::Generator& default_generator(c10::DeviceIndex index);
void grow_storage(const c10::Storage& storage, size_t bytes);

// The time between two recorded events of the guard's, in milliseconds.
double elapsed_ms(void* from, void* to);

// Waits, and raises what kernels of these devices have raised.
void wait_on_host(const char* kind, const std::vector<MarkPtr>& marks);

// The bytes that a tensor may touch, and a tensor of the CPU over them for a kernel.
Runtime::Span span_of(const at::Tensor& tensor, bool is_write);
at::Tensor for_kernel(const at::Tensor& tensor);

void register_kernels();
void register_backend();  // guard, allocator, hooks, generators

}  // namespace emulated
