// The kernels of the ops for collectives over TCP. Only kernels_cpu.cc includes this
// file.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_TCP_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_TCP_KERNELS_H_

#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../tcp/mesh.h"
#include "kernel_op.h"
#include "tensorflow/core/framework/cancellation.h"

namespace tfgradcomp {

// The meshes of this process. None is ever destroyed, because its threads go on.
class Meshes {
 public:
  static int64_t Add(Mesh* mesh) {
    const std::lock_guard<std::mutex> lock(Get().mutex_);
    Get().meshes_.push_back(mesh);
    return static_cast<int64_t>(Get().meshes_.size()) - 1;
  }

  // Returns null if there is none of this number.
  static Mesh* Find(int64_t number) {
    const std::lock_guard<std::mutex> lock(Get().mutex_);
    const auto count = static_cast<int64_t>(Get().meshes_.size());
    return number < 0 || number >= count ? nullptr : Get().meshes_[number];
  }

 private:
  static Meshes& Get() {
    static Meshes* const meshes = new Meshes;
    return *meshes;
  }

  std::mutex mutex_;
  std::vector<Mesh*> meshes_;
};

// Gathers vectors if `kIsGather`, else sends row k to worker k.
template <bool kIsGather>
class TcpOp : public tensorflow::AsyncOpKernel {
 public:
  explicit TcpOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    int64_t number;
    OP_REQUIRES_OK(context, context->GetAttr("mesh", &number));
    OP_REQUIRES_OK(context, context->GetAttr("site", &site_));
    OP_REQUIRES_OK(context, context->GetAttr("call_site", &call_site_));
    OP_REQUIRES_OK(context, context->GetAttr("num_workers", &num_workers_));
    mesh_ = Meshes::Find(number);
    OP_REQUIRES(context, mesh_ != nullptr && mesh_->size() == num_workers_,
                Invalid("mesh must name the connections between ", num_workers_,
                        " workers. Received: mesh=", number));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    OP_REQUIRES_ASYNC(
        context,
        input.dims() == (kIsGather ? 1 : 2) &&
            (kIsGather || input.dim_size(0) == num_workers_),
        Invalid("the input must be ",
                kIsGather ? "a vector" : "a matrix with a row for each worker",
                ". Received: shape ", input.shape().DebugString()),
        done);
    TensorShape shape = input.shape();
    if (kIsGather) shape.InsertDim(0, num_workers_);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, shape, &output), done);
    const int64_t bytes =
        input.NumElements() / (kIsGather ? 1 : num_workers_) * DataTypeSize(input.dtype());
    const char* const from = static_cast<const char*>(input.data());
    char* const to = static_cast<char*>(output->data());
    const auto outgoing = [=](int k) { return kIsGather ? from : from + k * bytes; };
    const auto incoming = [=](int k) { return to + k * bytes; };
    std::memcpy(incoming(mesh_->rank()), outgoing(mesh_->rank()), bytes);

    tensorflow::CancellationManager* const manager = context->cancellation_manager();
    tensorflow::CancellationToken token = 0;
    if (manager != nullptr) {
      token = manager->get_cancellation_token();
      Mesh* const mesh = mesh_;
      const bool goes_on = manager->RegisterCallback(
          token, [mesh] { mesh->Break("a step has failed or was cancelled here"); });
      OP_REQUIRES_ASYNC(context, goes_on, absl::CancelledError("The step has ended."),
                        done);
    }
    // The input is kept until all of it has been sent.
    mesh_->Post(site_, call_site_, bytes, outgoing, incoming,
                [context, input, manager, token, done](const std::string& error) {
                  // The callback may be running: do not wait for it.
                  if (manager != nullptr) manager->TryDeregisterCallback(token);
                  if (!error.empty()) context->SetStatus(absl::UnavailableError(error));
                  done();
                });
  }

 private:
  Mesh* mesh_;
  int64_t site_, num_workers_;
  std::string call_site_;
};

REGISTER_KERNEL_BUILDER(
    Name("Tfgradcomp>TcpGather").Device(tensorflow::DEVICE_CPU), TcpOp<true>);
REGISTER_KERNEL_BUILDER(
    Name("Tfgradcomp>TcpAllToAll").Device(tensorflow::DEVICE_CPU), TcpOp<false>);

}  // namespace tfgradcomp

// Starts to exchange messages over connected sockets, which it takes over; returns the
// number of the mesh. sockets[k] is connected to process k, except for that of `rank`.
extern "C" __attribute__((visibility("default"))) int64_t tfgradcomp_start_mesh(
    int rank, int size, const int* sockets) {
  return tfgradcomp::Meshes::Add(
      new tfgradcomp::Mesh(rank, std::vector<int>(sockets, sockets + size)));
}

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_TCP_KERNELS_H_
