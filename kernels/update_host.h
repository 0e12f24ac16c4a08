// The walk over a step's rows that all host implementations share: which regions close, where each of
// their rows comes from and which rows the ring keeps. What an implementation adds is the arithmetic of
// one region.
#pragma once

#include "kernels/summary_math.h"
#include "kernels/update.h"

namespace kvsummary {

class HostUpdateKernels final : public UpdateKernels {
 public:
  HostUpdateKernels(const char* name, CloseRegion close) : name_(name), close_(close) {}

  const char* name() const override { return name_; }
  int Decode(const CacheView& view, const DecodeStep& step, const Launch& launch) const override;
  int Verify(const CacheView& view, const VerifyStep& step, const Launch& launch) const override;
  int Prefill(const CacheView& view, const PrefillStep& step, const Launch& launch) const override;

 private:
  const char* name_;
  CloseRegion close_;
};

}  // namespace kvsummary
