// A CUDA graph of what a function gives the streams: a whole step in one launch.
//
//   Graph graph(dev);
//   graph.make([&] { step(); });      // runs nothing
//   for (...) graph.launch();
//
// It begins and ends with all streams at rest: they start where the compute stream stands, which waits for them, so
// events from before need no waiting for; and what the streams are given behind a launch waits for all of it. The
// pointers that it was made with must stay.
#pragma once

#include <cstdint>
#include <functional>

struct Device;

class Graph {
 public:
  explicit Graph(Device& dev) : dev_(dev) {}
  ~Graph();
  Graph(Graph&& o) noexcept : dev_(o.dev_), nodes_(o.nodes_), number_(o.number_), exec_(o.exec_) { o.exec_ = nullptr; }
  bool made() const { return exec_ != nullptr; }
  void make(const std::function<void()>& work);  // runs nothing
  void launch();                                 // on the compute stream
  // How many kernels, and of them NCCL's; how many copies and clears.
  struct Nodes {
    int kernels = 0, nccl_kernels = 0, copies = 0, others = 0;
    bool known = false;  // or the driver is too old to tell
  };
  const Nodes& nodes() const { return nodes_; }
  static bool can_know_nodes();  // whether the driver tells

 private:
  Device& dev_;
  Nodes nodes_;
  uint64_t number_ = 0;  // as the device counts them
  void* exec_ = nullptr;
};
