"""CUDA's driver by address: load a cubin, launch its function.  Nothing is linked; libcuda is opened on first use.

The structs below repeat the driver's binary interface (cuda.h of CUDA 12 and newer), so that building needs no CUDA
header; their sizes are checked when this file is compiled.
"""

from libc.stdint cimport uintptr_t
from libc.string cimport memset

from edgellm.errors import KernelError, StepDeviceError

cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *name, int flags)
    void *dlsym(void *library, const char *symbol)
    const int RTLD_NOW

cdef extern from *:
    """
    struct edge_launch_attribute {
        unsigned int id;
        unsigned int pad;
        union { char bytes[64]; int flag; } value;
    };
    struct edge_launch_config {
        unsigned int grid[3];
        unsigned int block[3];
        unsigned int shared_bytes;
        void *stream;
        struct edge_launch_attribute *attributes;
        unsigned int num_attributes;
    };
    static_assert(sizeof(edge_launch_attribute) == 72, "CUlaunchAttribute is 72 bytes");
    static_assert(offsetof(edge_launch_attribute, value) == 8, "its value starts at byte 8");
    static_assert(sizeof(edge_launch_config) == 56, "CUlaunchConfig is 56 bytes");
    static_assert(offsetof(edge_launch_config, stream) == 32, "its stream lies at byte 32");
    static_assert(offsetof(edge_launch_config, num_attributes) == 48, "its count lies at byte 48");
    """
    union edge_attribute_value "decltype(edge_launch_attribute::value)":
        int flag

    struct edge_launch_attribute:
        unsigned int id
        edge_attribute_value value

    struct edge_launch_config:
        unsigned int grid[3]
        unsigned int block[3]
        unsigned int shared_bytes
        void *stream
        edge_launch_attribute *attributes
        unsigned int num_attributes

cdef enum:
    CUDA_SUCCESS = 0
    ERROR_INVALID_CONTEXT = 201
    ERROR_INVALID_HANDLE = 400
    ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
    FUNCTION_MAX_THREADS = 0
    FUNCTION_STATIC_SHARED_BYTES = 1
    FUNCTION_LOCAL_BYTES = 3
    FUNCTION_REGISTERS = 4
    FUNCTION_MAX_DYNAMIC_SHARED_BYTES = 8
    SHARED_BYTES_WITHOUT_OPT_IN = 49152
    MOST_DEVICES = 64

ctypedef int (*init_t)(unsigned int) noexcept nogil
ctypedef int (*driver_version_t)(int *) noexcept nogil
ctypedef int (*device_get_t)(int *, int) noexcept nogil
ctypedef int (*device_attribute_t)(int *, int, int) noexcept nogil
ctypedef int (*context_retain_t)(void **, int) noexcept nogil
ctypedef int (*context_set_t)(void *) noexcept nogil
ctypedef int (*context_get_t)(void **) noexcept nogil
ctypedef int (*module_load_t)(void **, const void *) noexcept nogil
ctypedef int (*module_unload_t)(void *) noexcept nogil
ctypedef int (*module_function_t)(void **, void *, const char *) noexcept nogil
ctypedef int (*function_get_t)(int *, int, void *) noexcept nogil
ctypedef int (*function_set_t)(void *, int, int) noexcept nogil
ctypedef int (*launch_t)(const edge_launch_config *, void *, void **, void **) noexcept nogil
ctypedef int (*error_text_t)(int, const char **) noexcept nogil

cdef struct Driver:
    bint ready
    driver_version_t version
    device_get_t device_get
    device_attribute_t device_attribute
    context_retain_t context_retain
    context_set_t context_set
    context_get_t context_get
    module_load_t module_load
    module_unload_t module_unload
    module_function_t module_function
    function_get_t function_get
    function_set_t function_set
    launch_t launch
    error_text_t error_name
    error_text_t error_string

cdef Driver driver
cdef void *contexts[MOST_DEVICES]
memset(&driver, 0, sizeof(Driver))
memset(contexts, 0, sizeof(contexts))


cdef void *_symbol(void *library, const char *name) except NULL:
    cdef void *found = dlsym(library, name)
    if found == NULL:
        raise KernelError(f"the CUDA driver has no {name.decode()}; update it to one of CUDA 12 or newer")
    return found


cdef int _require_driver() except -1:
    """Open libcuda and look up what is used, once.  Runs with the GIL held, so threads do not race."""
    if driver.ready:
        return 0
    cdef void *library = dlopen(b"libcuda.so.1", RTLD_NOW)
    if library == NULL:
        raise KernelError("no CUDA driver on this machine (libcuda.so.1 cannot be opened); install NVIDIA's driver, "
                          "or use the device 'cpu'")
    driver.version = <driver_version_t>_symbol(library, b"cuDriverGetVersion")
    driver.device_get = <device_get_t>_symbol(library, b"cuDeviceGet")
    driver.device_attribute = <device_attribute_t>_symbol(library, b"cuDeviceGetAttribute")
    driver.context_retain = <context_retain_t>_symbol(library, b"cuDevicePrimaryCtxRetain")
    driver.context_set = <context_set_t>_symbol(library, b"cuCtxSetCurrent")
    driver.context_get = <context_get_t>_symbol(library, b"cuCtxGetCurrent")
    driver.module_load = <module_load_t>_symbol(library, b"cuModuleLoadData")
    driver.module_unload = <module_unload_t>_symbol(library, b"cuModuleUnload")
    driver.module_function = <module_function_t>_symbol(library, b"cuModuleGetFunction")
    driver.function_get = <function_get_t>_symbol(library, b"cuFuncGetAttribute")
    driver.function_set = <function_set_t>_symbol(library, b"cuFuncSetAttribute")
    driver.launch = <launch_t>_symbol(library, b"cuLaunchKernelEx")
    driver.error_name = <error_text_t>_symbol(library, b"cuGetErrorName")
    driver.error_string = <error_text_t>_symbol(library, b"cuGetErrorString")
    _check((<init_t>_symbol(library, b"cuInit"))(0), "cuInit")
    driver.ready = True
    return 0


cdef str _text(int status):
    cdef const char *name = NULL
    cdef const char *words = NULL
    driver.error_name(status, &name)
    driver.error_string(status, &words)
    if name == NULL or words == NULL:
        return f"CUDA error {status}"
    return f"{(<bytes>name).decode()}: {(<bytes>words).decode()}"


cdef int _check(int status, str call) except -1:
    if status != CUDA_SUCCESS:
        raise KernelError(f"{call} failed with {_text(status)}")
    return 0


cdef void *_primary_context(int ordinal) except NULL:
    """The device's primary context, which torch uses as well; kept for the life of the process."""
    cdef void *context = NULL
    cdef int device = 0
    if 0 <= ordinal < MOST_DEVICES and contexts[ordinal] != NULL:
        return contexts[ordinal]
    _check(driver.device_get(&device, ordinal), f"cuDeviceGet({ordinal})")
    _check(driver.context_retain(&context, device), f"cuDevicePrimaryCtxRetain({ordinal})")
    if ordinal < MOST_DEVICES:
        contexts[ordinal] = context
    return context


cdef void *_enter(int ordinal) except? NULL:
    """Make the device's context current on this thread; returns the one that was, for `_leave`."""
    cdef void *before = NULL
    cdef void *context = _primary_context(ordinal)
    _check(driver.context_get(&before), "cuCtxGetCurrent")
    if before != context:
        _check(driver.context_set(context), "cuCtxSetCurrent")
    return before


cdef void _leave(void *before) noexcept:
    """Make the earlier context current again, if there was one."""
    if before != NULL:
        driver.context_set(before)


def driver_version() -> int:
    """The CUDA version of the driver, 1000 * major + 10 * minor.

    Raises:
        KernelError: there is no driver.
    """
    cdef int version = 0
    _require_driver()
    _check(driver.version(&version), "cuDriverGetVersion")
    return version


def device_attribute(int ordinal, int attribute) -> int:
    """One number of CUdevice_attribute.

    Raises:
        KernelError: there is no driver, no such device or no such attribute.
    """
    cdef int device = 0
    cdef int value = 0
    _require_driver()
    _check(driver.device_get(&device, ordinal), f"cuDeviceGet({ordinal})")
    _check(driver.device_attribute(&value, attribute, device), f"cuDeviceGetAttribute({attribute})")
    return value


cdef class KernelFunction:
    """A function of a loaded cubin on one device.  Owns the module, for as long as the object lives.

    Any thread may launch it.  A launch that is under way or recorded in a graph needs the object alive.
    """

    cdef void *_module
    cdef void *_function
    cdef int _ordinal
    cdef int _shared_limit
    cdef readonly str name

    def __cinit__(self, bytes code not None, bytes function not None, int ordinal, str name not None):
        """Load `code` into the device's primary context.

        Args:
            function: its lowered name in the cubin.
            ordinal: of the device.
            name: for messages.
        Raises:
            KernelError: no driver, or the driver refuses the cubin (another architecture, damaged).
        """
        self._module = NULL
        self._ordinal = ordinal
        self.name = name
        cdef void *before
        _require_driver()
        before = _enter(ordinal)
        try:
            self._load(code, function)
        finally:
            _leave(before)

    cdef int _load(self, bytes code, bytes function) except -1:
        cdef str name = self.name
        _check(driver.module_load(&self._module, <const char *>code), f"loading kernel {name}: cuModuleLoadData")
        _check(
            driver.module_function(&self._function, self._module, <const char *>function),
            f"kernel {name}: cuModuleGetFunction({function.decode()})",
        )
        # The 48 KiB that a launch may have without asking include what the kernel declares itself.
        self._shared_limit = SHARED_BYTES_WITHOUT_OPT_IN - self._attribute(FUNCTION_STATIC_SHARED_BYTES)
        return 0

    def __dealloc__(self):
        cdef void *context = NULL
        # At exit the runtime may have destroyed the context, and the module with it.
        if self._module != NULL and driver.context_get(&context) == CUDA_SUCCESS and context != NULL:
            driver.module_unload(self._module)

    cdef int _attribute(self, int which) except -1:
        cdef int value = 0
        _check(driver.function_get(&value, which, self._function), f"kernel {self.name}: cuFuncGetAttribute")
        return value

    def resources(self) -> dict:
        """Registers a thread, spilled bytes a thread, static shared bytes and the most threads a block may have."""
        return {
            "registers": self._attribute(FUNCTION_REGISTERS),
            "local_bytes": self._attribute(FUNCTION_LOCAL_BYTES),
            "static_shared_bytes": self._attribute(FUNCTION_STATIC_SHARED_BYTES),
            "max_threads": self._attribute(FUNCTION_MAX_THREADS),
        }

    cdef int _allow_shared(self, int shared_bytes) except -1:
        """Opt in to more dynamic shared memory than 48 KiB; the driver is asked when the need grows."""
        cdef int status = driver.function_set(self._function, FUNCTION_MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        if status != CUDA_SUCCESS:
            declared = self._attribute(FUNCTION_STATIC_SHARED_BYTES)
            raise StepDeviceError(f"kernel {self.name} needs {shared_bytes} bytes of shared memory a block beside its "
                                  f"own {declared}: {_text(status)}; lower the tile or use a device with more")
        self._shared_limit = shared_bytes
        return 0

    def launch(self, tuple grid not None, tuple block not None, int shared_bytes, uintptr_t stream, uintptr_t params,
               bint overlap):
        """Put one launch on a stream; never waits for the device.  An empty grid launches nothing.

        Args:
            grid, block: (x, y, z).
            stream: raw CUstream; 0 is the default stream.
            params: address of the one parameter struct; copied before this returns.
            overlap: allow the kernel to start while the one before it ends (its code must wait for that one itself).
        Raises:
            StepDeviceError: the driver refuses, or reports the failure of earlier work.
        """
        cdef edge_launch_config config
        cdef edge_launch_attribute attribute
        cdef void *argument = <void *>params
        cdef int status
        config.grid[0], config.grid[1], config.grid[2] = grid
        if config.grid[0] == 0 or config.grid[1] == 0 or config.grid[2] == 0:
            return
        if shared_bytes > self._shared_limit:
            self._allow_shared(shared_bytes)
        config.block[0], config.block[1], config.block[2] = block
        config.shared_bytes = shared_bytes
        config.stream = <void *>stream
        config.attributes = NULL
        config.num_attributes = 0
        if overlap:
            memset(&attribute, 0, sizeof(edge_launch_attribute))
            attribute.id = ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.flag = 1
            config.attributes = &attribute
            config.num_attributes = 1
        with nogil:
            status = driver.launch(&config, self._function, &argument, NULL)
        if status == ERROR_INVALID_CONTEXT or status == ERROR_INVALID_HANDLE:
            status = self._launch_in_own_context(&config, &argument)
        if status != CUDA_SUCCESS:
            self._refused(status, grid, block, shared_bytes)

    cdef int _launch_in_own_context(self, edge_launch_config *config, void **argument) except -1:
        """Again on a thread where torch has not touched a device yet, or where another device is current."""
        cdef int status
        cdef void *before = _enter(self._ordinal)
        with nogil:
            status = driver.launch(config, self._function, argument, NULL)
        _leave(before)
        return status

    cdef int _refused(self, int status, tuple grid, tuple block, int shared_bytes) except -1:
        raise StepDeviceError(
            f"kernel {self.name} was not launched: {_text(status)} (grid {grid}, block {block}, "
            f"{shared_bytes} bytes of shared memory, device {self._ordinal})"
        )
