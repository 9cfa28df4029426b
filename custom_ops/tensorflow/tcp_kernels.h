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
  // Posts a call to so many peers, which the end of the step ends as well. `then` is
  // called if it has succeeded, else `done`.
  template <typename Outgoing, typename Incoming>
  void Post(OpKernelContext* context, const Outgoing& outgoing,
            const Incoming& incoming, int peers, DoneCallback done,
            std::function<void()> then) {
    tensorflow::CancellationManager* const manager = context->cancellation_manager();
    tensorflow::CancellationToken token = 0;
    if (manager != nullptr) {
      token = manager->get_cancellation_token();
      const auto stop = [mesh = mesh_] {
        mesh->Break("a step has failed or was cancelled here");
      };
      const bool goes_on = manager->RegisterCallback(token, stop);
      // Others would take the next step's message for the one that is not sent.
      if (!goes_on) stop();
      OP_REQUIRES_ASYNC(context, goes_on, absl::CancelledError("The step has ended."),
                        done);
    }
    // The input is kept until all of it has been sent.
    mesh_->Post(site_, call_site_, outgoing, incoming, peers,
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
    const Mesh* const mesh = mesh_;
    const auto outgoing = [=](int k) {
      return Span{kIsGather ? from : from + mesh->worker(k) * bytes, bytes};
    };
    const auto incoming = [=](int k) {
      return Span{to + mesh->worker(k) * bytes, bytes};
    };
    const int own = mesh->place();
    std::memcpy(incoming(own).data, outgoing(own).data, bytes);
    Post(context, outgoing, incoming, num_workers_ - 1, done, done);
  }
};

// Adds vectors, or takes their maxima, in the order of TensorFlow's ring: of members k,
// k + 1, ..., N - 1, 0, ..., k - 1 for part k.
//
// Short vectors take two calls: member k merges part k, and shares it. Long ones take
// 2(N - 1) with the next and the previous member: where several messages share a slow
// link, its queue overflows, and connections wait for packets that were lost.
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
    const Parts from(input, num_workers_), to(*output, num_workers_);
    if (num_workers_ > 2 && from.width * sizeof(T) >= kBytesOfRing) {
      return GoRound(context, from, to, 0, std::move(done));
    }
    MergeOwn(context, from, to, std::move(done));
  }

 private:
  // A part of so many bytes goes round the ring.
  static constexpr int64_t kBytesOfRing = 256 * 1024;
  static constexpr int64_t kMergedByReceiver = 16 * 1024;

  // The parts of a vector, one for each worker, aligned as the ring's.
  struct Parts {
    Parts(const Tensor& vector, int64_t count)
        : data(static_cast<T*>(vector.data())),
          size(vector.NumElements()),
          count(count) {
      constexpr int64_t kAligned = 64 / sizeof(T);
      width = ((size + count - 1) / count + kAligned - 1) / kAligned * kAligned;
    }

    // Part `k`, which may lie outside of 0 ... count - 1.
    T* begin(int64_t k) const { return data + std::min(Index(k) * width, size); }
    int64_t elements(int64_t k) const {
      return std::min<int64_t>(width, data + size - begin(k));
    }
    Span operator[](int64_t k) const {
      return {reinterpret_cast<char*>(begin(k)), elements(k) * sizeof(T)};
    }

    T* data;
    int64_t size, count, width;

   private:
    int64_t Index(int64_t k) const { return (k % count + count) % count; }
  };

  // Merges the part of this worker, which all others send to it, and shares it.
  void MergeOwn(OpKernelContext* context, Parts from, Parts to, DoneCallback done) {
    const int64_t place = mesh_->place(), own = to.elements(place);
    const int peers = num_workers_ - 1;
    Tensor received;
    OP_REQUIRES_OK_ASYNC(
        context,
        context->allocate_temp(context->input(0).dtype(),
                               TensorShape({num_workers_, own}), &received),
        done);
    T* const rows = static_cast<T*>(received.data());
    std::memcpy(rows + place * own, from.begin(place), own * sizeof(T));
    const auto share = [=] {
      Post(
          context, [=](int) { return to[place]; }, [=](int k) { return to[k]; }, peers,
          done, done);
    };
    const auto merge = [=, received = std::move(received)] {
      T* const result = to.begin(place);
      std::memcpy(result, rows + place * own, own * sizeof(T));
      for (int64_t i = 1; i < num_workers_; ++i) {
        Merge(rows + (place + i) % num_workers_ * own, own, result);
      }
      share();
    };
    Post(
        context, [=](int k) { return from[k]; },
        [=](int k) {
          return Span{reinterpret_cast<char*>(rows + k * own), own * sizeof(T)};
        },
        peers, done,
        [=] {
          // The thread that receives has other things to do.
          if (own < kMergedByReceiver) return merge();
          Schedule(context, merge);
        });
  }

  // Takes steps `step` to 2(N - 1) - 1 of the ring. In the first half each part goes to
  // all workers, which merge theirs into it; in the second half the result does.
  void GoRound(OpKernelContext* context, Parts from, Parts to, int64_t step,
               DoneCallback done) {
    const int64_t half = num_workers_ - 1;
    if (step == 2 * half) return done();
    const bool is_first_half = step < half;
    const int64_t sent = mesh_->place() - (is_first_half ? step : step - half - 1);
    const int64_t received = sent - 1;
    Post(
        context, [=](int) { return step == 0 ? from[sent] : to[sent]; },
        [=](int) { return to[received]; }, /*peers=*/1, done,
        [=] {
          if (!is_first_half) return GoRound(context, from, to, step + 1, done);
          Schedule(context, [=] {
            Merge(from.begin(received), to.elements(received), to.begin(received));
            GoRound(context, from, to, step + 1, done);
          });
        });
  }

  static void Schedule(OpKernelContext* context, std::function<void()> function) {
    auto* const threads = context->device()->tensorflow_cpu_worker_threads();
    threads->workers->Schedule(std::move(function));
  }

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
// number of the mesh. The arguments are those of Mesh().
extern "C" __attribute__((visibility("default"))) int64_t
tfgradcomp_start_mesh(int place, int size, const int* sockets, const int* workers) {
  return tfgradcomp::Meshes::Add(
      new tfgradcomp::Mesh(place, std::vector<int>(sockets, sockets + size),
                           std::vector<int>(workers, workers + size)));
}

#endif  // TFGRADCOMP_CUSTOM_OPS_TENSORFLOW_TCP_KERNELS_H_
