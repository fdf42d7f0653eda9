// A libcuda for Triton's CUDA driver on a machine without a card: it loads and launches nothing, and writes down the
// last launch. Its symbols are what Triton 3.6 to 3.9 link; its card has an H100's limits.
#include <cuda.h>
#include <string.h>
#undef cuDevicePrimaryCtxRetain
#undef cuGetProcAddress

#define MOST_KERNELS 256
#define MOST_PARAMETERS 64

// The driver is given pointers to parameters and no sizes: a real one reads them from the kernel's code. Here the next
// kernel's are announced.
typedef struct {
  int count;
  int bytes[MOST_PARAMETERS];
} Kernel;

typedef struct {
  int kernel; // its number, in the order in which kernels were loaded
  unsigned grid[3], block[3], shared;
  int count;
  cuuint64_t values[MOST_PARAMETERS];
} Launch;

static Kernel kernels[MOST_KERNELS], next;
static int loaded, context;
Launch recorded_launch;
int recorded_launches;

void announce_kernel(int count, const int *bytes) {
  next.count = count;
  memcpy(next.bytes, bytes, count * sizeof *bytes);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  if (loaded == MOST_KERNELS)
    return CUDA_ERROR_OUT_OF_MEMORY;
  kernels[loaded] = next;
  *function = (CUfunction)&kernels[loaded++];
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  const Kernel *kernel = (const Kernel *)function;
  Launch launch = {
      .kernel = kernel - kernels,
      .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
      .block = {config->blockDimX, config->blockDimY, config->blockDimZ},
      .shared = config->sharedMemBytes,
      .count = kernel->count,
  };
  for (int i = 0; i < kernel->count; i++)
    memcpy(&launch.values[i], parameters[i], kernel->bytes[i]);
  recorded_launch = launch;
  recorded_launches++;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 * 1024; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 228 * 1024; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 64 * 1024; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

// On a card this checks a pointer that a kernel is given and translates host memory; here every address stays.
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)&context;
  return CUDA_SUCCESS;
}

static CUresult one_context(CUcontext *it) {
  *it = (CUcontext)&context;
  return CUDA_SUCCESS;
}

static CUresult zero(int *it) {
  *it = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *it) { return one_context(it); }
CUresult cuDevicePrimaryCtxRetain(CUcontext *it, CUdevice device) { return one_context(it); }
CUresult cuCtxSetCurrent(CUcontext it) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return zero(device); }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return zero(device); }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "an error of the recording libcuda";
  return CUDA_SUCCESS;
}
