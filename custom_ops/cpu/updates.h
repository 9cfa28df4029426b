// Decoded values: written, or applied to weights at once.

// How many of w, m and v a rule has.
constexpr int VectorsOf(UpdateRule rule) {
  return rule == UpdateRule::kSgd ? 1 : rule >= UpdateRule::kAdam ? 3 : 2;
}
constexpr bool HasFloors(UpdateRule rule) { return rule == UpdateRule::kFrozenAdam; }

// Calls body(rule) with a rule as a constant.
template <typename Body>
inline __attribute__((always_inline)) void WithRule(UpdateRule rule, const Body& body) {
  switch (rule) {
    case UpdateRule::kSgd:
      return body(Constant<UpdateRule::kSgd>());
    case UpdateRule::kMomentum:
      return body(Constant<UpdateRule::kMomentum>());
    case UpdateRule::kNesterov:
      return body(Constant<UpdateRule::kNesterov>());
    case UpdateRule::kAdam:
      return body(Constant<UpdateRule::kAdam>());
    case UpdateRule::kFrozenAdam:
      return body(Constant<UpdateRule::kFrozenAdam>());
  }
}

// The steps of vectors.h for a vector of values u: F c[4], then w, and m and v if the
// rule has them, and a floor for each element.
template <UpdateRule kRule>
inline __attribute__((always_inline)) void StepVector(const F (&c)[4], F u, float* w,
                                                      float* m, float* v,
                                                      const float* floors) {
  const F weight = Load(w);
  if constexpr (kRule == UpdateRule::kSgd) {
    Store(w, Sub(weight, Mul(u, c[0])));
  } else if constexpr (kRule == UpdateRule::kAdam) {
    const F old_m = Load(m), old_v = Load(v);
    const F new_m = Add(old_m, Mul(Sub(u, old_m), c[1]));
    const F new_v = Add(old_v, Mul(Sub(Mul(u, u), old_v), c[2]));
    Store(m, new_m);
    Store(v, new_v);
    Store(w, Sub(weight, Div(Mul(new_m, c[0]), Add(Sqrt(new_v), c[3]))));
  } else if constexpr (HasFloors(kRule)) {
    const F root = Max(Load(floors), Sqrt(Load(v)));
    Store(m, u);
    Store(w, Sub(weight, Div(Mul(u, c[0]), Add(root, c[1]))));
  } else {
    const F step = Mul(u, c[0]), new_m = Sub(Mul(Load(m), c[1]), step);
    Store(m, new_m);
    const bool is_nesterov = kRule == UpdateRule::kNesterov;
    Store(w, Add(weight, is_nesterov ? Sub(Mul(new_m, c[1]), step) : new_m));
  }
}

template <UpdateRule kRule>
inline __attribute__((always_inline)) void StepGroup(const F (&c)[4],
                                                     const F (&values)[kParts],
                                                     float* w, float* m, float* v,
                                                     const float* floors) {
  for (int part = 0; part < kParts; ++part) {
    const int at = part * kWidth;
    StepVector<kRule>(c, values[part], w + at, m + at, v + at, floors + at);
  }
}

// Spreads the coefficients of an update over vectors.
inline void Coefficients(const Update& update, F (&c)[4]) {
  const UpdateRule rule = update.rule;
  const int count = rule == UpdateRule::kSgd ? 1 : rule == UpdateRule::kAdam ? 4 : 2;
  for (int i = 0; i < 4; ++i) c[i] = Set(i < count ? update.coefficients[i] : 0);
}

// Decays weights of a part, before a step.
inline __attribute__((always_inline)) void Decay(const Update& update, int64_t part,
                                                 float* w, int64_t count) {
  if (update.decays == nullptr) return;
  const float decay = update.decays[part], rate = update.rate;
  if (decay == 0) return;
  for (int64_t i = 0; i < count; ++i) w[i] -= w[i] * decay * rate;
}

// Writes the floor of a part for each element.
inline __attribute__((always_inline)) void Floor(const Update& update, int64_t part,
                                                 float* floors, int64_t count) {
  for (int64_t i = 0; i < count; ++i) floors[i] = update.floors[part];
}

// Writes groups of values, or takes the step of an update with them.
class ValueWriter {
 public:
  ValueWriter(const CutVector<float>& values, const Update* update, int64_t size)
      : writer_(update == nullptr ? values : update->w, size),
        update_(update),
        size_(size) {
    if (update == nullptr) return;
    Coefficients(*update, c_);
    const CutVector<float>* const vectors[] = {&update->w, &update->m, &update->v};
    for (int i = 0; i < kVectors; ++i) parts_[i] = {*vectors[i], size};
  }

  // The group at element `begin`, a multiple of 32.
  inline __attribute__((always_inline)) void Put(int64_t begin,
                                                 const F (&group)[kParts]) {
    if (update_ == nullptr) return writer_.Put(begin, group);
    if (!parts_[0].Holds(begin, begin + kGroup)) return StepBeyond(begin, group);
    WithRule(update_->rule, [&](auto rule) __attribute__((always_inline)) {
      StepInPart<rule.kValue>(begin, group);
    });
  }

 private:
  static constexpr int kVectors = 3;

  // The step of a group that the part holds.
  template <UpdateRule kRule>
  inline __attribute__((always_inline)) void StepInPart(int64_t begin,
                                                        const F (&group)[kParts]) {
    float *p[kVectors] = {}, floors[kGroup];
    for (int i = 0; i < VectorsOf(kRule); ++i) {
      parts_[i].Seek(begin);
      p[i] = parts_[i].At(begin);
      PrefetchAfter(p[i]);
    }
    const int64_t part = parts_[0].index();
    Decay(*update_, part, p[0], kGroup);
    if constexpr (HasFloors(kRule)) {
      Floor(*update_, part, floors, kGroup);
    }
    StepGroup<kRule>(c_, group, p[0], p[1], p[2], floors);
  }

  // The step of a group that begins in another part, and may be in several.
  __attribute__((noinline)) void StepBeyond(int64_t begin, const F (&group)[kParts]) {
    parts_[0].Seek(begin);
    const bool is_held = parts_[0].Holds(begin, begin + kGroup);
    WithRule(update_->rule, [&](auto rule) __attribute__((always_inline)) {
      if (is_held) return StepInPart<rule.kValue>(begin, group);
      StepInParts<rule.kValue>(begin, Smaller(size_, begin + kGroup), group);
    });
  }

  template <UpdateRule kRule>
  inline __attribute__((always_inline)) void StepInParts(int64_t begin, int64_t end,
                                                         const F (&group)[kParts]) {
    float* p[kVectors] = {};
    float floors[kGroup] = {};
    float buffers[kVectors][kGroup] = {};
    for (int i = 0; i < VectorsOf(kRule); ++i) {
      p[i] = buffers[i];
      parts_[i].EachPiece(begin, end, [&](float* from, int64_t at, int64_t count) {
        memcpy(p[i] + (at - begin), from, count * sizeof(float));
        if (i > 0) return;
        const int64_t part = parts_[0].index();
        Decay(*update_, part, p[0] + (at - begin), count);
        if constexpr (HasFloors(kRule)) {
          Floor(*update_, part, floors + (at - begin), count);
        }
      });
    }
    StepGroup<kRule>(c_, group, p[0], p[1], p[2], floors);
    for (int i = 0; i < VectorsOf(kRule); ++i) {
      parts_[i].EachPiece(begin, end, [&](float* to, int64_t at, int64_t count) {
        memcpy(to, p[i] + (at - begin), count * sizeof(float));
      });
    }
  }

  GroupWriter writer_;
  const Update* update_;
  int64_t size_;
  F c_[4];
  PartOfVector<float> parts_[kVectors] = {{{}, 0}, {{}, 0}, {{}, 0}};
};
