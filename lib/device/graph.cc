#include "lib/device/graph.h"

#include <memory>
#include <vector>

#include "lib/device/activity.h"
#include "lib/device/device.h"

#if FSDP_CUDA
#include "lib/device/driver.h"
#endif

Graph::~Graph() {
#if FSDP_CUDA
  if (exec_) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(exec_));
#endif
}

#if FSDP_CUDA
namespace gpu {
const void* clear_words_kernel();  // in stream.cu: one thread clears n words at p (uint32_t* p, int64_t n)
}

namespace {
std::vector<cudaGraphNode_t> nodes_of(cudaGraph_t graph) {
  size_t n = 0;
  CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &n));
  std::vector<cudaGraphNode_t> nodes(n);
  CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &n));
  return nodes;
}

// What a driver tells of a graph's nodes. The runtime knows neither the kernels of libraries that launch through the
// driver nor all kinds of nodes.
struct NodeTeller {
  CUresult (*type_of)(CUgraphNode, CUgraphNodeType*) = nullptr;
  CUresult (*params_of)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS*) = nullptr;
  CUresult (*name_of)(const char**, CUfunction) = nullptr;
  CUresult (*name_of_kernel)(const char**, CUkernel) = nullptr;
  const bool known = driver_function("cuGraphNodeGetType", 12030, &type_of) &&
                     driver_function("cuGraphKernelNodeGetParams", 12030, &params_of) &&
                     driver_function("cuFuncGetName", 12030, &name_of) &&
                     driver_function("cuKernelGetName", 12030, &name_of_kernel);
};

Graph::Nodes count_nodes(cudaGraph_t graph) {
  const NodeTeller driver;
  Graph::Nodes count;
  count.known = driver.known;
  if (!count.known) return count;
  for (cudaGraphNode_t node : nodes_of(graph)) {
    CUgraphNodeType type;
    if (driver.type_of(node, &type) != CUDA_SUCCESS) {
      count.others++;
    } else if (type == CU_GRAPH_NODE_TYPE_KERNEL) {
      CUDA_KERNEL_NODE_PARAMS params = {};
      const char* name = "";
      count.kernels++;
      if (driver.params_of(node, &params) != CUDA_SUCCESS) continue;
      if (params.func) driver.name_of(&name, params.func);
      else driver.name_of_kernel(&name, params.kern);
      count.nccl_kernels += activity::is_nccl_kernel(name);
    } else {
      const bool copies = type == CU_GRAPH_NODE_TYPE_MEMCPY || type == CU_GRAPH_NODE_TYPE_MEMSET;
      (copies ? count.copies : count.others)++;
    }
  }
  return count;
}

// cuBLASLt clears a counter before a product of many tiles. Between kernels a clear takes a graph 8 to 15 us, a kernel
// that does the same 3: so that kernel takes its place.
void clear_by_kernels(cudaGraph_t graph) {
#if CUDART_VERSION >= 13000  // edges have data
  for (cudaGraphNode_t node : nodes_of(graph)) {
    cudaGraphNodeType type;
    cudaMemsetParams clear = {};
    if (cudaGraphNodeGetType(node, &type) != cudaSuccess) cudaGetLastError(), type = cudaGraphNodeTypeEmpty;
    if (type != cudaGraphNodeTypeMemset) continue;
    CUDA_CHECK(cudaGraphMemsetNodeGetParams(node, &clear));
    const int64_t bytes = int64_t(clear.elementSize) * int64_t(clear.width);
    if (clear.value != 0 || clear.height > 1 || bytes > 32 || bytes % 4 || reinterpret_cast<uintptr_t>(clear.dst) % 4)
      continue;
    int64_t words = bytes / 4;
    size_t n_before = 0, n_behind = 0;
    CUDA_CHECK(cudaGraphNodeGetDependencies(node, nullptr, nullptr, &n_before));
    CUDA_CHECK(cudaGraphNodeGetDependentNodes(node, nullptr, nullptr, &n_behind));
    std::vector<cudaGraphNode_t> before(n_before), behind(n_behind);
    std::vector<cudaGraphEdgeData> edges_before(n_before), edges_behind(n_behind);
    CUDA_CHECK(cudaGraphNodeGetDependencies(node, before.data(), edges_before.data(), &n_before));
    CUDA_CHECK(cudaGraphNodeGetDependentNodes(node, behind.data(), edges_behind.data(), &n_behind));
    cudaKernelNodeParams kernel = {};
    void* args[] = {&clear.dst, &words};
    kernel.func = const_cast<void*>(gpu::clear_words_kernel());
    kernel.gridDim = kernel.blockDim = dim3(1), kernel.kernelParams = args;
    cudaGraphNode_t by_kernel;
    CUDA_CHECK(cudaGraphAddKernelNode(&by_kernel, graph, before.data(), n_before, &kernel));
    const std::vector<cudaGraphNode_t> from(n_behind, by_kernel);
    CUDA_CHECK(cudaGraphAddDependencies(graph, from.data(), behind.data(), edges_behind.data(), n_behind));
    CUDA_CHECK(cudaGraphDestroyNode(node));
  }
#endif
}
}  // namespace
#endif

void Graph::make(const std::function<void()>& work) {
  ASSERT(dev_.backend == Backend::gpu && dev_.mode == Mode::run && !exec_ && !dev_.in_graph);
#if FSDP_CUDA
  std::vector<Stream*> others;
  for (Stream* s : {&dev_.gather(), &dev_.reduce()})
    if (others.empty() || others[0] != s) others.push_back(s);
  Event fork(dev_);
  std::vector<Event> joins;
  for (size_t i = 0; i < others.size(); i++) joins.emplace_back(dev_);
  const cudaStream_t compute = dev_.compute().cuda();
  CUDA_CHECK(cudaStreamBeginCapture(compute, cudaStreamCaptureModeThreadLocal));
  dev_.in_graph = number_ = ++dev_.graphs;
  cudaGraph_t graph = nullptr;
  try {
    dev_.compute().record(fork);
    for (Stream* s : others) s->wait(fork);
    work();
    for (size_t i = 0; i < others.size(); i++) others[i]->record(joins[i]), dev_.compute().wait(joins[i]);
  } catch (...) {
    cudaStreamEndCapture(compute, &graph);
    dev_.in_graph = 0;
    throw;
  }
  dev_.in_graph = 0;
  CUDA_CHECK(cudaStreamEndCapture(compute, &graph));
  clear_by_kernels(graph);
  nodes_ = count_nodes(graph);
  cudaGraphExec_t exec = nullptr;
  // Without the flag all kernels have the priority of the stream that the graph is launched on: what talks to other
  // ranks would wait until the kernel beside it has given out all its blocks.
  CUDA_CHECK(cudaGraphInstantiate(&exec, graph, cudaGraphInstantiateFlagUseNodePriority));
  CUDA_CHECK(cudaGraphDestroy(graph));
  exec_ = exec;
  if (!dev_.after_graph) dev_.after_graph = std::make_unique<Event>(dev_);
#else
  (void)work;
#endif
}

bool Graph::can_know_nodes() {
#if FSDP_CUDA
  return NodeTeller().known;
#else
  return false;
#endif
}

void Graph::launch() {
  ASSERT(exec_);
#if FSDP_CUDA
  dev_.mark("one CUDA graph");
  if (dev_.on_graph_launch) dev_.on_graph_launch(number_);
  CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(exec_), dev_.compute().cuda()));
  dev_.compute().record(*dev_.after_graph);
  // An event that was recorded here and, later and for itself, in a step that is no graph says nothing of this launch.
  for (Stream* s : {&dev_.gather(), &dev_.reduce()}) s->wait(*dev_.after_graph);
#endif
}
