// Decoded values: written, or applied to weights at once.

// The steps of vectors.h for a group of values u: F c[4], then w, and m and v if the
// rule has them, and a floor for each element.
template <UpdateRule kRule>
inline __attribute__((always_inline)) void StepGroup(const F (&c)[4],
                                                     const F (&values)[kParts],
                                                     float* w, float* m, float* v,
                                                     const float* floors) {
  for (int part = 0; part < kParts; ++part) {
    const int at = part * kWidth;
    const F u = values[part], weight = Load(w + at);
    if constexpr (kRule == UpdateRule::kSgd) {
      Store(w + at, Sub(weight, Mul(u, c[0])));
    } else if constexpr (kRule == UpdateRule::kAdam) {
      const F old_m = Load(m + at), old_v = Load(v + at);
      const F new_m = Add(old_m, Mul(Sub(u, old_m), c[1]));
      const F new_v = Add(old_v, Mul(Sub(Mul(u, u), old_v), c[2]));
      Store(m + at, new_m);
      Store(v + at, new_v);
      Store(w + at, Sub(weight, Div(Mul(new_m, c[0]), Add(Sqrt(new_v), c[3]))));
    } else if constexpr (kRule == UpdateRule::kFrozenAdam) {
      const F root = Max(Load(floors + at), Sqrt(Load(v + at)));
      Store(m + at, u);
      Store(w + at, Sub(weight, Div(Mul(u, c[0]), Add(root, c[1]))));
    } else {
      const F step = Mul(u, c[0]), new_m = Sub(Mul(Load(m + at), c[1]), step);
      Store(m + at, new_m);
      const bool is_nesterov = kRule == UpdateRule::kNesterov;
      Store(w + at, Add(weight, is_nesterov ? Sub(Mul(new_m, c[1]), step) : new_m));
    }
  }
}

// The number of coefficients of a rule.
inline int CoefficientsOf(UpdateRule rule) {
  return rule == UpdateRule::kSgd ? 1 : rule == UpdateRule::kAdam ? 4 : 2;
}

// Writes groups of values, or takes the step of an update with them.
class ValueWriter {
 public:
  ValueWriter(const CutVector<float>& values, const Update* update, int64_t size)
      : writer_(update == nullptr ? values : update->w, size),
        update_(update),
        size_(size) {
    if (update == nullptr) return;
    for (int i = 0; i < CoefficientsOf(update->rule); ++i) {
      c_[i] = Set(update->coefficients[i]);
    }
    const CutVector<float>* const vectors[] = {&update->w, &update->m, &update->v};
    for (int i = 0; i < kVectors; ++i) parts_[i] = {*vectors[i], size};
  }

  // The group at element `begin`, a multiple of 32.
  inline __attribute__((always_inline)) void Put(int64_t begin,
                                                 const F (&group)[kParts]) {
    if (update_ == nullptr) return writer_.Put(begin, group);
    Step(begin, Smaller(size_, begin + kGroup), group);
  }

  // Takes the step of the elements [begin, end), at most a group, which may begin
  // anywhere.
  void StepAnywhere(int64_t begin, int64_t end, const F (&group)[kParts]) {
    Step(begin, end, group);
  }

 private:
  static constexpr int kVectors = 3;

  __attribute__((noinline)) void Step(int64_t begin, int64_t end,
                                      const F (&group)[kParts]) {
    switch (update_->rule) {
      case UpdateRule::kSgd:
        return StepBy<UpdateRule::kSgd, 1>(begin, end, group);
      case UpdateRule::kMomentum:
        return StepBy<UpdateRule::kMomentum, 2>(begin, end, group);
      case UpdateRule::kNesterov:
        return StepBy<UpdateRule::kNesterov, 2>(begin, end, group);
      case UpdateRule::kAdam:
        return StepBy<UpdateRule::kAdam, 3>(begin, end, group);
      case UpdateRule::kFrozenAdam:
        return StepBy<UpdateRule::kFrozenAdam, 3>(begin, end, group);
    }
  }

  template <UpdateRule kRule, int kUsed>
  inline __attribute__((always_inline)) void StepBy(int64_t begin, int64_t end,
                                                    const F (&group)[kParts]) {
    float* p[kVectors] = {};
    float floors[kGroup] = {};
    for (int i = 0; i < kUsed; ++i) parts_[i].Seek(begin);
    if (end - begin == kGroup && parts_[0].Holds(begin, end)) {
      for (int i = 0; i < kUsed; ++i) {
        p[i] = parts_[i].At(begin);
        PrefetchAfter(p[i]);
      }
      Decay(p[0], kGroup);
      if constexpr (kRule == UpdateRule::kFrozenAdam) Floor(floors, kGroup);
      return StepGroup<kRule>(c_, group, p[0], p[1], p[2], floors);
    }
    float buffers[kVectors][kGroup] = {};
    for (int i = 0; i < kUsed; ++i) {
      p[i] = buffers[i];
      parts_[i].EachPiece(begin, end, [&](float* from, int64_t at, int64_t count) {
        memcpy(p[i] + (at - begin), from, count * sizeof(float));
        if (i > 0) return;
        Decay(p[0] + (at - begin), count);
        if constexpr (kRule == UpdateRule::kFrozenAdam) {
          Floor(floors + (at - begin), count);
        }
      });
    }
    StepGroup<kRule>(c_, group, p[0], p[1], p[2], floors);
    for (int i = 0; i < kUsed; ++i) {
      parts_[i].EachPiece(begin, end, [&](float* to, int64_t at, int64_t count) {
        memcpy(to, p[i] + (at - begin), count * sizeof(float));
      });
    }
  }

  // Decays weights of the part that was looked for last.
  inline __attribute__((always_inline)) void Decay(float* w, int64_t count) const {
    if (update_->decays == nullptr) return;
    const float decay = update_->decays[parts_[0].index()], rate = update_->rate;
    if (decay == 0) return;
    for (int64_t i = 0; i < count; ++i) w[i] -= w[i] * decay * rate;
  }

  // Writes the floor of the part that was looked for last.
  inline __attribute__((always_inline)) void Floor(float* floors, int64_t count) const {
    const float floor = update_->floors[parts_[0].index()];
    for (int64_t i = 0; i < count; ++i) floors[i] = floor;
  }

  GroupWriter writer_;
  const Update* update_;
  int64_t size_;
  F c_[4];
  PartOfVector<float> parts_[kVectors] = {{{}, 0}, {{}, 0}, {{}, 0}};
};
