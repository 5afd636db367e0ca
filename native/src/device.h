// Devices and backends, through ggml's registry only.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include <ggml-cpp.h>

#include "kvgraph.h"

namespace kvg {

int32_t device_count();
// error(KVG_INVALID_ARGUMENT) when there is no such index
void device_info(int32_t index, kvg_device_info & out);

// "auto": RPC servers that were added, then every GPU, or an integrated one where there is no other; "none": nothing; otherwise
// names, in any case of letters, separated by commas. The CPU is never among them: alone it means nothing, as "none" does.
// error(KVG_DEVICE) when one is absent, error(KVG_INVALID_ARGUMENT) for one named twice, and for the CPU beside others,
// error(KVG_UNSUPPORTED) in a child of a fork whose parent knew the devices, unless it is the CPU alone
std::vector<ggml_backend_dev_t> find_devices(const std::string & names);
ggml_backend_dev_t cpu_device();
bool is_cpu(ggml_backend_dev_t dev);
// A device of another machine. It says yes to every operation, so what it is asked must be what every backend has.
bool is_rpc(ggml_backend_dev_t dev);
// Whether copies that a backend of the device was given run one after the other, in both directions: CUDA's go through one stream. Vulkan
// may use two queues.
bool copies_in_order(ggml_backend_dev_t dev);
// Makes the devices of a server known. precondition: a server of this ggml answers there, else ggml ends the process.
// error(KVG_DEVICE) when this ggml has no RPC, or the server no devices
void add_rpc_server(const char * endpoint);

// Whether the device runs this operation, as far as it can be asked. precondition: its types are such that it may be asked
bool can_run(ggml_backend_dev_t dev, const ggml_tensor * op);
// The same of all of a graph's operations.
bool can_run_all(ggml_backend_dev_t dev, ggml_cgraph * graph);

// error(KVG_DEVICE) when the device can't be opened
ggml_backend_ptr open_backend(ggml_backend_dev_t dev);
// CPUs that this process may use
int usable_cpus();

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
// Whether bytes are free there, as far as the device tells.
bool has_room(ggml_backend_dev_t dev, uint64_t bytes);

// Before memory is written for the first time: in pages of 4 KiB the kernel's zeroing and mapping take four times as long as the copy.
void advise_huge_pages(void * begin, size_t n_bytes);

// "1.5 GiB" for messages
std::string format_bytes(uint64_t bytes);

} // namespace kvg
