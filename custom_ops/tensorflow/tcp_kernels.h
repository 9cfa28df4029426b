// The kernels of the ops for collectives over TCP. Only kernels_cpu.cc includes this
// file.

#ifndef TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_TCP_KERNELS_H_
#define TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_TCP_KERNELS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../tcp/mesh.h"
#include "kernel_op.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/platform/denormal.h"

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

// What the collectives have in common.
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

 protected:
  // Posts a call that the end of the step ends as well. `then` is called if it has
  // succeeded, else `done`.
  template <typename Outgoing, typename Incoming>
  void Post(OpKernelContext* context, const Outgoing& outgoing,
            const Incoming& incoming, DoneCallback done, std::function<void()> then) {
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
    mesh_->Post(site_, call_site_, outgoing, incoming,
                [context, input = context->input(0), manager, token, done,
                 then](const std::string& error) {
                  // The callback may be running: do not wait for it.
                  if (manager != nullptr) manager->TryDeregisterCallback(token);
                  if (error.empty()) return then();
                  // TensorFlow would rename an UnavailableError of this operation.
                  context->SetStatus(absl::AbortedError(error));
                  done();
                });
  }

  Mesh* mesh_;
  int64_t site_, num_workers_;
  std::string call_site_;
};

// Gathers vectors if `kIsGather`, else sends row k to worker k.
template <bool kIsGather>
class TcpMoveOp : public TcpOp {
 public:
  using TcpOp::TcpOp;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    const bool fits = kIsGather || input.dim_size(0) == num_workers_;
    OP_REQUIRES_ASYNC(
        context, input.dims() == (kIsGather ? 1 : 2) && fits,
        Invalid("gather takes a vector, all_to_all a row for each of ", num_workers_,
                " workers. Received: shape ", input.shape().DebugString()),
        done);
    TensorShape shape = input.shape();
    if (kIsGather) shape.InsertDim(0, num_workers_);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, shape, &output), done);
    const uint64_t bytes =
        output->NumElements() / num_workers_ * tensorflow::DataTypeSize(input.dtype());
    char* const from = static_cast<char*>(input.data());
    char* const to = static_cast<char*>(output->data());
    const auto outgoing = [=](int k) {
      return Span{kIsGather ? from : from + k * bytes, bytes};
    };
    const auto incoming = [=](int k) { return Span{to + k * bytes, bytes}; };
    const int rank = mesh_->rank();
    std::memcpy(incoming(rank).data, outgoing(rank).data, bytes);
    Post(context, outgoing, incoming, done, done);
  }
};

// Adds vectors, or takes their maxima, in the order of TensorFlow's ring: worker k
// merges part k of the vectors of workers k, k + 1, ..., N - 1, 0, ..., k - 1.
template <typename T>
class TcpReduceOp : public TcpOp {
 public:
  explicit TcpReduceOp(OpKernelConstruction* context) : TcpOp(context) {
    std::string merge;
    OP_REQUIRES_OK(context, context->GetAttr("merge", &merge));
    is_sum_ = merge == "sum";
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    OP_REQUIRES_ASYNC(context, input.dims() == 1,
                      Invalid("the input must be a vector. Received: shape ",
                              input.shape().DebugString()),
                      done);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, input.shape(), &output),
                         done);
    const int64_t size = input.NumElements(), rank = mesh_->rank();
    // The ring's parts are aligned.
    constexpr int64_t kAligned = 64 / sizeof(T);
    const int64_t width =
        ((size + num_workers_ - 1) / num_workers_ + kAligned - 1) / kAligned * kAligned;
    const auto part = [=](T* vector, int64_t k) {
      const int64_t begin = std::min(k * width, size);
      const int64_t elements = std::min(width, size - begin);
      return Span{reinterpret_cast<char*>(vector + begin), elements * sizeof(T)};
    };
    T* const from = static_cast<T*>(input.data());
    T* const to = static_cast<T*>(output->data());
    const int64_t own = part(to, rank).bytes / sizeof(T);
    Tensor received;
    OP_REQUIRES_OK_ASYNC(
        context,
        context->allocate_temp(input.dtype(), TensorShape({num_workers_, own}),
                               &received),
        done);
    T* const rows = static_cast<T*>(received.data());
    std::memcpy(rows + rank * own, part(from, rank).data, own * sizeof(T));
    const auto share = [=] {
      Post(
          context, [=](int) { return part(to, rank); },
          [=](int k) { return part(to, k); }, done, done);
    };
    const auto merge = [=, received = std::move(received)] {
      T* const result = reinterpret_cast<T*>(part(to, rank).data);
      std::memcpy(result, rows + rank * own, own * sizeof(T));
      for (int64_t i = 1; i < num_workers_; ++i) {
        Merge(rows + (rank + i) % num_workers_ * own, own, result);
      }
      share();
    };
    const auto* threads = context->device()->tensorflow_cpu_worker_threads();
    Post(
        context, [=](int k) { return part(from, k); },
        [=](int k) {
          return Span{reinterpret_cast<char*>(rows + k * own), own * sizeof(T)};
        },
        done,
        [=] {
          // The thread that receives has other things to do.
          if (own < kMergedByReceiver) return merge();
          threads->workers->Schedule(merge);
        });
  }

 private:
  static constexpr int64_t kMergedByReceiver = 16 * 1024;

  void Merge(const T* row, int64_t count, T* result) {
    // As the threads of TensorFlow's ring, whatever thread this is.
    tensorflow::port::ScopedFlushDenormal flush;
    if (is_sum_) {
      for (int64_t i = 0; i < count; ++i) result[i] = result[i] + row[i];
    } else {
      for (int64_t i = 0; i < count; ++i) result[i] = std::max(result[i], row[i]);
    }
  }

  bool is_sum_;
};

REGISTER_KERNEL_BUILDER(Name("Tfgradcomp>TcpGather").Device(tensorflow::DEVICE_CPU),
                        TcpMoveOp<true>);
REGISTER_KERNEL_BUILDER(Name("Tfgradcomp>TcpAllToAll").Device(tensorflow::DEVICE_CPU),
                        TcpMoveOp<false>);

#define TFGRADCOMP_REGISTER_REDUCE(T)                         \
  REGISTER_KERNEL_BUILDER(Name("Tfgradcomp>TcpReduce")        \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          TcpReduceOp<T>)
TFGRADCOMP_REGISTER_REDUCE(int32_t);
TFGRADCOMP_REGISTER_REDUCE(float);
TFGRADCOMP_REGISTER_REDUCE(Eigen::half);
TFGRADCOMP_REGISTER_REDUCE(tensorflow::bfloat16);

}  // namespace tfgradcomp

// Starts to exchange messages over connected sockets, which it takes over; returns the
// number of the mesh. sockets[k] is connected to process k, except for that of `rank`.
extern "C" __attribute__((visibility("default"))) int64_t
tfgradcomp_start_mesh(int rank, int size, const int* sockets) {
  return tfgradcomp::Meshes::Add(
      new tfgradcomp::Mesh(rank, std::vector<int>(sockets, sockets + size)));
}

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_TCP_KERNELS_H_
