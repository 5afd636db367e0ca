#include "device.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include <pthread.h>
#include <sched.h>
#include <strings.h>
#include <sys/mman.h>

#include "error.h"
#include "fault.h"

namespace kvg {

static constexpr size_t MAX_DEVICES = 15; // GGML_SCHED_MAX_BACKENDS, less the CPU

static std::atomic<bool> left_behind{false}; // this process was forked from one that had listed the devices

// Their drivers begin when ggml lists them, with threads and connections that a fork leaves to the parent: the child would wait for ever.
int32_t device_count() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { left_behind = true; });
    (void) registered;
    return static_cast<int32_t>(ggml_backend_dev_count());
}

static int32_t device_type(ggml_backend_dev_t dev) {
    switch (ggml_backend_dev_type(dev)) {
    case GGML_BACKEND_DEVICE_TYPE_CPU:
        return KVG_DEVICE_CPU;
    case GGML_BACKEND_DEVICE_TYPE_GPU:
    case GGML_BACKEND_DEVICE_TYPE_IGPU:
        return KVG_DEVICE_GPU;
    default:
        return KVG_DEVICE_ACCEL;
    }
}

void device_info(int32_t index, kvg_device_info & out) {
    if (index < 0 || index >= device_count()) {
        fail(KVG_INVALID_ARGUMENT, "no device has index %d: there are %d", index, device_count());
    }
    ggml_backend_dev_t dev = ggml_backend_dev_get(static_cast<size_t>(index));
    const memory found = device_memory(dev);
    out.name = ggml_backend_dev_name(dev);
    out.description = ggml_backend_dev_description(dev);
    out.type = device_type(dev);
    out.memory_free = found.free;
    out.memory_total = found.total;
}

ggml_backend_dev_t cpu_device() {
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!dev) {
        fail(KVG_DEVICE, "this ggml has no CPU backend; reinstall llama-cpp-python");
    }
    return dev;
}

bool is_cpu(ggml_backend_dev_t dev) { return ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU; }

namespace {

bool is_of(ggml_backend_dev_t dev, const char * registry) {
    return strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), registry) == 0;
}

} // namespace

bool is_rpc(ggml_backend_dev_t dev) { return is_of(dev, "RPC"); }

bool copies_in_order(ggml_backend_dev_t dev) { return is_of(dev, "CUDA") || is_of(dev, "ROCm") || is_of(dev, "MUSA"); }

void add_rpc_server(const char * endpoint) {
    ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    void * address = rpc ? ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server") : nullptr;
    if (!address) {
        fail(KVG_DEVICE, "this ggml has no RPC; it needs a llama-cpp-python built with CMAKE_ARGS=\"-DGGML_RPC=on\"");
    }
    ggml_backend_reg_t server = reinterpret_cast<ggml_backend_reg_t (*)(const char *)>(address)(endpoint);
    if (!server) {
        fail(KVG_DEVICE, "the RPC server at %s has no devices", endpoint);
    }
    ggml_backend_register(server); // a second time changes nothing
}

// One card may be seen by two backends. After a fork their drivers can't be asked: CUDA's ends the process.
static bool is_listed(const std::vector<ggml_backend_dev_t> & devices, ggml_backend_dev_t dev) {
    if (left_behind) {
        return false;
    }
    ggml_backend_dev_props props = {};
    ggml_backend_dev_get_props(dev, &props);
    return std::any_of(devices.begin(), devices.end(), [&](ggml_backend_dev_t other) {
        ggml_backend_dev_props known = {};
        ggml_backend_dev_get_props(other, &known);
        return other == dev || (known.device_id && props.device_id && strcmp(known.device_id, props.device_id) == 0);
    });
}

static std::vector<ggml_backend_dev_t> auto_devices() {
    std::vector<ggml_backend_dev_t> servers;
    std::vector<ggml_backend_dev_t> cards;
    std::vector<ggml_backend_dev_t> integrated;
    for (int32_t i = 0; i < device_count(); ++i) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(static_cast<size_t>(i));
        if (is_rpc(dev)) {
            servers.push_back(dev);
        } else if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU && !is_listed(cards, dev)) {
            cards.push_back(dev);
        } else if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_IGPU && integrated.empty()) {
            integrated.push_back(dev);
        }
    }
    const auto & ours = cards.empty() ? integrated : cards;
    servers.insert(servers.end(), ours.begin(), ours.end());
    servers.resize(std::min(servers.size(), MAX_DEVICES));
    return servers;
}

static ggml_backend_dev_t find_device(const std::string & name) {
    std::string known;
    for (int32_t i = 0; i < device_count(); ++i) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(static_cast<size_t>(i));
        if (device_type(dev) == KVG_DEVICE_ACCEL) {
            continue; // helps the CPU with a few ops, and aborts on the others
        }
        if (strcasecmp(name.c_str(), ggml_backend_dev_name(dev)) == 0) {
            return dev;
        }
        known += std::string(known.empty() ? "" : ", ") + ggml_backend_dev_name(dev);
    }
    fail(KVG_DEVICE,
         "no device that runs models is called '%s'; there are: %s (and \"auto\"). Others need a llama-cpp-python built for "
         "them",
         name.c_str(), known.c_str());
}

static std::vector<ggml_backend_dev_t> named_devices(const std::string & names) {
    if (strcasecmp(names.c_str(), "auto") == 0) {
        return auto_devices();
    }
    if (strcasecmp(names.c_str(), "none") == 0) {
        return {};
    }
    std::vector<ggml_backend_dev_t> found;
    std::istringstream list(names);
    for (std::string name; std::getline(list, name, ',') || found.empty();) {
        ggml_backend_dev_t dev = find_device(name);
        if (std::find(found.begin(), found.end(), dev) != found.end()) {
            fail(KVG_INVALID_ARGUMENT, "device %s is named twice in '%s'", name.c_str(), names.c_str());
        }
        found.push_back(dev);
    }
    if (found.size() > MAX_DEVICES) {
        fail(KVG_INVALID_ARGUMENT, "%zu devices are named; ggml schedules over %zu at most", found.size(), MAX_DEVICES);
    }
    if (std::any_of(found.begin(), found.end(), is_cpu)) {
        if (found.size() > 1) {
            fail(KVG_INVALID_ARGUMENT,
                 "'%s' has the CPU beside other devices: it takes the layers that n_gpu_layers leaves it, and is not named",
                 names.c_str());
        }
        found.clear();
    }
    return found;
}

std::vector<ggml_backend_dev_t> find_devices(const std::string & names) {
    std::vector<ggml_backend_dev_t> found = named_devices(names);
    if (left_behind && !found.empty()) {
        fail(KVG_UNSUPPORTED,
             "this process was forked from one that had looked for devices, and %s works in that one only: use device=\"cpu\", "
             "or "
             "start processes with multiprocessing.get_context(\"spawn\")",
             ggml_backend_dev_name(found.front()));
    }
    return found;
}

bool can_run(ggml_backend_dev_t dev, const ggml_tensor * op) {
    if (!is_cpu(dev) && op->op == GGML_OP_CUSTOM) {
        return false; // a remote device says yes, and would call an address of this process
    }
    if (!is_cpu(dev) &&
        ((op->op == GGML_OP_ROPE && fault_active("lacks-rope")) ||
         (op->op == GGML_OP_MUL_MAT && fault_active("lacks-mul-mat")) ||
         (op->op == GGML_OP_MUL_MAT && ggml_nbytes(op->src[0]) > 65536 && fault_active("lacks-large-mul-mat")))) {
        return false;
    }
    return ggml_backend_dev_supports_op(dev, op);
}

bool can_run_all(ggml_backend_dev_t dev, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        if (!can_run(dev, ggml_graph_node(graph, i))) {
            return false;
        }
    }
    return true;
}

ggml_backend_ptr open_backend(ggml_backend_dev_t dev) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    if (!backend) {
        fail(KVG_DEVICE, "device %s could not be opened", ggml_backend_dev_name(dev));
    }
    return backend;
}

int usable_cpus() {
    cpu_set_t cpus;
    return sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? std::max(1, CPU_COUNT(&cpus)) : 1;
}

uint32_t span_align(ggml_backend_dev_t dev) { return is_cpu(dev) ? 32 : MAX_SPAN_ALIGN; }

memory device_memory(ggml_backend_dev_t dev) {
    if (left_behind && !is_cpu(dev)) {
        return {0, 0};
    }
    size_t free = 0;
    size_t total = 0;
    ggml_backend_dev_memory(dev, &free, &total);
    if (is_cpu(dev)) {
        std::ifstream meminfo("/proc/meminfo");
        for (std::string line; std::getline(meminfo, line);) {
            unsigned long long kib = 0;
            if (sscanf(line.c_str(), "MemAvailable: %llu kB", &kib) == 1) {
                free = std::min<size_t>(free, kib * 1024);
            }
        }
    }
    return {free, total};
}

bool has_room(ggml_backend_dev_t dev, uint64_t bytes) {
    const memory there = device_memory(dev);
    return there.total == 0 || bytes <= there.free;
}

void advise_huge_pages(void * begin, size_t n_bytes) {
    constexpr uintptr_t HUGE_PAGE = 2u << 20;
    const auto at = reinterpret_cast<uintptr_t>(begin);
    const uintptr_t first = (at + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t last = (at + n_bytes) / HUGE_PAGE * HUGE_PAGE;
    if (first < last) {
        madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE); // a hint
    }
}

std::string format_bytes(uint64_t bytes) {
    const double mib = static_cast<double>(bytes) / (1024.0 * 1024.0);
    return mib >= 1024.0 ? strformat("%.2f GiB", mib / 1024.0) : strformat("%.2f MiB", mib);
}

} // namespace kvg
