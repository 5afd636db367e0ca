// Devices and backends, through ggml's registry only.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include <ggml-cpp.h>

#include "kvgraph.h"

namespace kvg {

int32_t device_count();
// error(KVG_INVALID_ARGUMENT) when there is no such index
void device_info(int32_t index, kvg_device_info & out);

// "auto": the first GPU, else the CPU; otherwise a device by its name, in any case of letters. error(KVG_DEVICE) when absent.
ggml_backend_dev_t find_device(const std::string & name);
ggml_backend_dev_t cpu_device();
bool is_cpu(ggml_backend_dev_t dev);

// error(KVG_DEVICE) when the device can't be opened
ggml_backend_ptr open_backend(ggml_backend_dev_t dev);
// CPUs that this process may use
int usable_cpus();
// CPU backends only; others ignore it
void set_threads(ggml_backend_t backend, int n_threads);

// Cells by which an attended span is aligned there. Views of K that start elsewhere abort on Vulkan, and CUDA's fast flash attention
// wants whole 256s; on the CPU any number will do, but ggml's flash attention takes another graph for another span.
constexpr uint32_t MAX_SPAN_ALIGN = 256;
uint32_t span_align(ggml_backend_dev_t dev);

// Runs a graph: true when it succeeded. Backends report failures by status, Vulkan also by exceptions.
template <class F> bool computed(F && compute) {
    try {
        return compute() == GGML_STATUS_SUCCESS;
    } catch (const std::exception &) {
        return false;
    }
}

struct memory {
    uint64_t free;
    uint64_t total; // 0: the device doesn't tell
};
// Of the CPU what the kernel says is available (ggml calls all of it free).
memory device_memory(ggml_backend_dev_t dev);

// Before memory is written for the first time: in pages of 4 KiB the kernel's zeroing and mapping take four times as long as the copy.
void advise_huge_pages(void * begin, size_t n_bytes);

// "1.5 GiB" for messages
std::string format_bytes(uint64_t bytes);

} // namespace kvg
