// Two CUDA devices that run nothing: what torch's C++ side asks of a device, for a build of torch
// without CUDA. Streams and events are simulated in Python (cuda.py); here is one stream per device.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using namespace c10;

constexpr DeviceIndex DEVICES = 2;
thread_local DeviceIndex current = 0;  // as in CUDA: every thread begins with device 0

Device device(DeviceIndex index) {
  return Device(DeviceType::CUDA, index);
}

Stream only_stream(Device of) {
  return Stream(Stream::DEFAULT, of);
}

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device to) const override {
    const Device before = device(current);
    current = to.index();
    return before;
  }
  Device getDevice() const override { return device(current); }
  void setDevice(Device to) const override { current = to.index(); }
  void uncheckedSetDevice(Device to) const noexcept override { current = to.index(); }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  Stream getStream(Device of) const override { return only_stream(of); }
  Stream getDefaultStream(Device of) const override { return only_stream(of); }
  Stream exchangeStream(Stream to) const override { return only_stream(to.device()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  bool isStreamCapturing(const Stream&) const override { return false; }

  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

struct Registration {
  Registration() {
    if (!impl::hasDeviceGuardImpl(DeviceType::CUDA)) {
      new impl::DeviceGuardImplRegistrar(DeviceType::CUDA, new Guard());
    }
  }
} registration;

struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  int getNumGPUs() const override { return DEVICES; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
};
}  // namespace

extern "C" int simulated_device() { return current; }
extern "C" void set_simulated_device(int index) { current = static_cast<DeviceIndex>(index); }

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
