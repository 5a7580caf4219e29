// A stand-in for the CUDA driver: enough for cuda.bindings to call it, and facts of each call kept for the test to read.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  const char* attributes;
  unsigned count;
};
struct KernelNode {
  void* function;
  unsigned grid[3], block[3], shared;
  void** arguments;
  void** extra;
  void* kernel;
  void* context;
};
static uint64_t first = 0x7f0012345600, structure[2] = {0x7f00aabbcc00, 5};
static int third = 7;
static void* arguments_of_node[] = {&first, structure, &third};
static const size_t sizes_of_node[] = {8, 16, 4};

static int parameter(size_t i, size_t* offset, size_t* size) {
  if (i >= 3) return 1;
  *offset = 8 * i;
  if (size) *size = sizes_of_node[i];
  return 0;
}

extern "C" {
uint64_t seen[16];  // grid, block, shared, stream, attribute count, attribute id and value, two argument words
int unloaded, dynamic_shared;

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* v) { return *v = 13010, 0; }
int cuDeviceGetCount(int* n) { return *n = 1, 0; }
int cuDeviceGet(int* device, int i) { return *device = i, i ? 101 : 0; }
int cuDeviceGetAttribute(int* v, int which, int) {
  const int table[][2] = {{75, 9}, {76, 0}, {38, 62914560}, {16, 132}, {10, 32}, {36, 3201000}, {37, 6144}, {18, 0}};
  for (auto& row : table)
    if (row[0] == which) return *v = row[1], 0;
  return 1;
}
int cuDeviceGetName(char* name, int size, int) { return strncpy(name, "NVIDIA H200", size), 0; }
int cuDeviceTotalMem_v2(size_t* n, int) { return *n = 150754820096, 0; }
int cuDeviceGetPCIBusId(char* name, int size, int) { return strncpy(name, "0000:1B:00.0", size), 0; }
int cuDeviceGetUuid_v2(char* id, int) {
  for (int i = 0; i < 16; i++) id[i] = static_cast<char>(i);
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  return *module = reinterpret_cast<void*>(0x111), memcmp(image, "good", 4) ? 209 : 0;
}
int cuModuleUnload(void*) { return unloaded++, 0; }
int cuModuleGetFunction(void** f, void*, const char* name) {
  return *f = reinterpret_cast<void*>(0x222), strcmp(name, "missing") ? 0 : 500;
}
int cuFuncSetAttribute(void*, int which, int value) { return dynamic_shared = which == 8 ? value : -1, 0; }
int cuFuncGetAttribute(int* v, int which, void*) { return *v = 100 + which, 0; }
int cuLaunchKernelEx(const LaunchConfig* c, void* f, void** arguments, void** extra) {
  if (f != reinterpret_cast<void*>(0x222) || extra) return 1;
  for (int i = 0; i < 3; i++) seen[i] = c->grid[i], seen[3 + i] = c->block[i];
  seen[6] = c->shared, seen[7] = reinterpret_cast<uint64_t>(c->stream), seen[8] = c->count;
  seen[9] = c->count ? *reinterpret_cast<const int*>(c->attributes) : 0;
  seen[10] = c->count ? *reinterpret_cast<const int*>(c->attributes + 8) : 0;
  for (int i = 0; i < 2; i++) seen[11 + i] = *static_cast<uint64_t*>(arguments[i]);
  return c->block[0] > 1024 ? 1 : 0;
}
int cuCtxSynchronize() { return 700; }
// Three nodes in an order that is not the order of execution: 3 runs after 2, and 2 (a copy) after 1.
int cuGraphGetNodes(void*, void** nodes, size_t* n) {
  const uintptr_t order[] = {3, 1, 2};
  for (size_t i = 0; nodes && i < 3 && i < *n; i++) nodes[i] = reinterpret_cast<void*>(order[i]);
  return *n = 3, 0;
}
int cuGraphGetEdges_v2(void*, void** from, void** to, void*, size_t* n) {
  for (uintptr_t i = 0; from && i < 2; i++)
    from[i] = reinterpret_cast<void*>(i + 1), to[i] = reinterpret_cast<void*>(i + 2);
  return *n = 2, 0;
}
int cuGraphNodeGetType(void* node, int* type) { return *type = reinterpret_cast<uintptr_t>(node) == 2, 0; }
int cuGraphKernelNodeGetParams_v2(void* node, KernelNode* p) {
  memset(p, 0, sizeof *p);
  (reinterpret_cast<uintptr_t>(node) == 1 ? p->function : p->kernel) = reinterpret_cast<void*>(0x300);
  p->grid[0] = 4, p->grid[1] = 2, p->grid[2] = 1, p->block[0] = 64, p->block[1] = p->block[2] = 1;
  p->arguments = arguments_of_node;
  return 0;
}
int cuFuncGetName(const char** name, void*) { return *name = "of_a_module", 0; }
int cuKernelGetName(const char** name, void*) { return *name = "of_a_library", 0; }
int cuFuncGetParamInfo(void*, size_t i, size_t* offset, size_t* size) { return parameter(i, offset, size); }
int cuKernelGetParamInfo(void*, size_t i, size_t* offset, size_t* size) { return parameter(i, offset, size); }

int cuGetProcAddress_v2(const char* symbol, void** f, int, uint64_t, int* status) {
  static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  char newer[128];
  snprintf(newer, sizeof newer, "%s_v2", symbol);
  *f = dlsym(self, newer);
  if (!*f) *f = dlsym(self, symbol);
  if (status) *status = *f ? 0 : 1;
  return *f ? 0 : 500;
}
int cuGetProcAddress(const char* symbol, void** f, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, f, version, flags, nullptr);
}
}
