//! The numbers with which the driver answers, and their names.

/// `CUresult`, and with the same numbers `cudaError_t`.
pub type Code = i32;

/// What a call gives, or why it does not.
pub type Outcome<T = ()> = Result<T, Code>;

/// Defines the codes, and a table of number, driver's name, runtime's name and text.
macro_rules! codes {
    ($($name:ident = $number:literal, $driver:literal, $runtime:literal, $text:literal;)*) => {
        $(#[allow(dead_code, reason = "a test may plan any of them")]
        pub const $name: Code = $number;)*
        const TABLE: &[(Code, &std::ffi::CStr, &std::ffi::CStr, &std::ffi::CStr)] =
            &[$(($number, $driver, $runtime, $text),)*];
    };
}

codes! {
    SUCCESS = 0, c"CUDA_SUCCESS", c"cudaSuccess", c"no error";
    INVALID_VALUE = 1, c"CUDA_ERROR_INVALID_VALUE", c"cudaErrorInvalidValue", c"invalid argument";
    OUT_OF_MEMORY = 2, c"CUDA_ERROR_OUT_OF_MEMORY", c"cudaErrorMemoryAllocation", c"out of memory";
    NOT_INITIALIZED = 3, c"CUDA_ERROR_NOT_INITIALIZED", c"cudaErrorInitializationError",
        c"initialization error";
    DEINITIALIZED = 4, c"CUDA_ERROR_DEINITIALIZED", c"cudaErrorCudartUnloading", c"driver shutting down";
    PROFILER_DISABLED = 5, c"CUDA_ERROR_PROFILER_DISABLED", c"cudaErrorProfilerDisabled",
        c"profiler disabled while using external profiling tool";
    PROFILER_NOT_INITIALIZED = 6, c"CUDA_ERROR_PROFILER_NOT_INITIALIZED", c"cudaErrorProfilerNotInitialized",
        c"profiler not initialized: call cudaProfilerInitialize()";
    PROFILER_ALREADY_STARTED = 7, c"CUDA_ERROR_PROFILER_ALREADY_STARTED", c"cudaErrorProfilerAlreadyStarted",
        c"profiler already started";
    PROFILER_ALREADY_STOPPED = 8, c"CUDA_ERROR_PROFILER_ALREADY_STOPPED", c"cudaErrorProfilerAlreadyStopped",
        c"profiler already stopped";
    STUB_LIBRARY = 34, c"CUDA_ERROR_STUB_LIBRARY", c"cudaErrorStubLibrary", c"CUDA driver is a stub library";
    CALL_REQUIRES_NEWER_DRIVER = 36, c"CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", c"cudaErrorCallRequiresNewerDriver",
        c"API call is not supported in the installed CUDA driver";
    DEVICE_UNAVAILABLE = 46, c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"cudaErrorDevicesUnavailable",
        c"CUDA-capable device(s) is/are busy or unavailable";
    NO_DEVICE = 100, c"CUDA_ERROR_NO_DEVICE", c"cudaErrorNoDevice", c"no CUDA-capable device is detected";
    INVALID_DEVICE = 101, c"CUDA_ERROR_INVALID_DEVICE", c"cudaErrorInvalidDevice", c"invalid device ordinal";
    DEVICE_NOT_LICENSED = 102, c"CUDA_ERROR_DEVICE_NOT_LICENSED", c"cudaErrorDeviceNotLicensed",
        c"device doesn't have valid Grid license";
    INVALID_IMAGE = 200, c"CUDA_ERROR_INVALID_IMAGE", c"cudaErrorInvalidKernelImage",
        c"device kernel image is invalid";
    INVALID_CONTEXT = 201, c"CUDA_ERROR_INVALID_CONTEXT", c"cudaErrorDeviceUninitialized",
        c"invalid device context";
    CONTEXT_ALREADY_CURRENT = 202, c"CUDA_ERROR_CONTEXT_ALREADY_CURRENT", c"cudaErrorUnknown",
        c"context already current";
    MAP_FAILED = 205, c"CUDA_ERROR_MAP_FAILED", c"cudaErrorMapBufferObjectFailed",
        c"mapping of buffer object failed";
    UNMAP_FAILED = 206, c"CUDA_ERROR_UNMAP_FAILED", c"cudaErrorUnmapBufferObjectFailed",
        c"unmapping of buffer object failed";
    ARRAY_IS_MAPPED = 207, c"CUDA_ERROR_ARRAY_IS_MAPPED", c"cudaErrorArrayIsMapped", c"array is mapped";
    ALREADY_MAPPED = 208, c"CUDA_ERROR_ALREADY_MAPPED", c"cudaErrorAlreadyMapped", c"resource already mapped";
    NO_BINARY_FOR_GPU = 209, c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"cudaErrorNoKernelImageForDevice",
        c"no kernel image is available for execution on the device";
    ALREADY_ACQUIRED = 210, c"CUDA_ERROR_ALREADY_ACQUIRED", c"cudaErrorAlreadyAcquired",
        c"resource already acquired";
    NOT_MAPPED = 211, c"CUDA_ERROR_NOT_MAPPED", c"cudaErrorNotMapped", c"resource not mapped";
    NOT_MAPPED_AS_ARRAY = 212, c"CUDA_ERROR_NOT_MAPPED_AS_ARRAY", c"cudaErrorNotMappedAsArray",
        c"resource not mapped as array";
    NOT_MAPPED_AS_POINTER = 213, c"CUDA_ERROR_NOT_MAPPED_AS_POINTER", c"cudaErrorNotMappedAsPointer",
        c"resource not mapped as pointer";
    ECC_UNCORRECTABLE = 214, c"CUDA_ERROR_ECC_UNCORRECTABLE", c"cudaErrorECCUncorrectable",
        c"uncorrectable ECC error encountered";
    UNSUPPORTED_LIMIT = 215, c"CUDA_ERROR_UNSUPPORTED_LIMIT", c"cudaErrorUnsupportedLimit",
        c"limit is not supported on this architecture";
    CONTEXT_ALREADY_IN_USE = 216, c"CUDA_ERROR_CONTEXT_ALREADY_IN_USE", c"cudaErrorDeviceAlreadyInUse",
        c"exclusive-thread device already in use by a different thread";
    PEER_ACCESS_UNSUPPORTED = 217, c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", c"cudaErrorPeerAccessUnsupported",
        c"peer access is not supported between these two devices";
    INVALID_PTX = 218, c"CUDA_ERROR_INVALID_PTX", c"cudaErrorInvalidPtx", c"a PTX JIT compilation failed";
    INVALID_GRAPHICS_CONTEXT = 219, c"CUDA_ERROR_INVALID_GRAPHICS_CONTEXT", c"cudaErrorInvalidGraphicsContext",
        c"invalid OpenGL or DirectX context";
    NVLINK_UNCORRECTABLE = 220, c"CUDA_ERROR_NVLINK_UNCORRECTABLE", c"cudaErrorNvlinkUncorrectable",
        c"uncorrectable NVLink error detected during the execution";
    JIT_COMPILER_NOT_FOUND = 221, c"CUDA_ERROR_JIT_COMPILER_NOT_FOUND", c"cudaErrorJitCompilerNotFound",
        c"PTX JIT compiler library not found";
    UNSUPPORTED_PTX = 222, c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", c"cudaErrorUnsupportedPtxVersion",
        c"the provided PTX was compiled with an unsupported toolchain.";
    JIT_COMPILATION_DISABLED = 223, c"CUDA_ERROR_JIT_COMPILATION_DISABLED", c"cudaErrorJitCompilationDisabled",
        c"PTX JIT compilation was disabled";
    UNSUPPORTED_EXEC_AFFINITY = 224, c"CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY", c"cudaErrorUnsupportedExecAffinity",
        c"the provided execution affinity is not supported";
    UNSUPPORTED_DEVSIDE_SYNC = 225, c"CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC", c"cudaErrorUnsupportedDevSideSync",
        c"the provided PTX contains unsupported call to cudaDeviceSynchronize";
    CONTAINED = 226, c"CUDA_ERROR_CONTAINED", c"cudaErrorContained",
        c"Invalid access of peer GPU memory over nvlink or a hardware error";
    INVALID_SOURCE = 300, c"CUDA_ERROR_INVALID_SOURCE", c"cudaErrorInvalidSource",
        c"device kernel image is invalid";
    FILE_NOT_FOUND = 301, c"CUDA_ERROR_FILE_NOT_FOUND", c"cudaErrorFileNotFound", c"file not found";
    SHARED_OBJECT_SYMBOL_NOT_FOUND = 302, c"CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", c"cudaErrorSharedObjectSymbolNotFound",
        c"shared object symbol not found";
    SHARED_OBJECT_INIT_FAILED = 303, c"CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", c"cudaErrorSharedObjectInitFailed",
        c"shared object initialization failed";
    OPERATING_SYSTEM = 304, c"CUDA_ERROR_OPERATING_SYSTEM", c"cudaErrorOperatingSystem",
        c"OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400, c"CUDA_ERROR_INVALID_HANDLE", c"cudaErrorInvalidResourceHandle",
        c"invalid resource handle";
    ILLEGAL_STATE = 401, c"CUDA_ERROR_ILLEGAL_STATE", c"cudaErrorIllegalState",
        c"the operation cannot be performed in the present state";
    LOSSY_QUERY = 402, c"CUDA_ERROR_LOSSY_QUERY", c"cudaErrorLossyQuery",
        c"attempted introspection would be semantically lossy";
    NOT_FOUND = 500, c"CUDA_ERROR_NOT_FOUND", c"cudaErrorSymbolNotFound", c"named symbol not found";
    NOT_READY = 600, c"CUDA_ERROR_NOT_READY", c"cudaErrorNotReady", c"device not ready";
    ILLEGAL_ADDRESS = 700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"cudaErrorIllegalAddress",
        c"an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES = 701, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"cudaErrorLaunchOutOfResources",
        c"too many resources requested for launch";
    LAUNCH_TIMEOUT = 702, c"CUDA_ERROR_LAUNCH_TIMEOUT", c"cudaErrorLaunchTimeout",
        c"the launch timed out and was terminated";
    LAUNCH_INCOMPATIBLE_TEXTURING = 703, c"CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING", c"cudaErrorLaunchIncompatibleTexturing",
        c"launch uses incompatible texturing mode";
    PEER_ACCESS_ALREADY_ENABLED = 704, c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"cudaErrorPeerAccessAlreadyEnabled",
        c"peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705, c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", c"cudaErrorPeerAccessNotEnabled",
        c"peer access has not been enabled";
    PRIMARY_CONTEXT_ACTIVE = 708, c"CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", c"cudaErrorSetOnActiveProcess",
        c"cannot set while device is active in this process";
    CONTEXT_IS_DESTROYED = 709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"cudaErrorContextIsDestroyed",
        c"context is destroyed";
    ASSERT = 710, c"CUDA_ERROR_ASSERT", c"cudaErrorAssert", c"device-side assert triggered";
    TOO_MANY_PEERS = 711, c"CUDA_ERROR_TOO_MANY_PEERS", c"cudaErrorTooManyPeers",
        c"peer mapping resources exhausted";
    ALREADY_REGISTERED = 712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"cudaErrorHostMemoryAlreadyRegistered",
        c"part or all of the requested memory range is already mapped";
    NOT_REGISTERED = 713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"cudaErrorHostMemoryNotRegistered",
        c"pointer does not correspond to a registered memory region";
    HARDWARE_STACK_ERROR = 714, c"CUDA_ERROR_HARDWARE_STACK_ERROR", c"cudaErrorHardwareStackError",
        c"hardware stack error";
    ILLEGAL_INSTRUCTION = 715, c"CUDA_ERROR_ILLEGAL_INSTRUCTION", c"cudaErrorIllegalInstruction",
        c"an illegal instruction was encountered";
    MISALIGNED_ADDRESS = 716, c"CUDA_ERROR_MISALIGNED_ADDRESS", c"cudaErrorMisalignedAddress",
        c"misaligned address";
    INVALID_ADDRESS_SPACE = 717, c"CUDA_ERROR_INVALID_ADDRESS_SPACE", c"cudaErrorInvalidAddressSpace",
        c"operation not supported on global/shared address space";
    INVALID_PC = 718, c"CUDA_ERROR_INVALID_PC", c"cudaErrorInvalidPc", c"invalid program counter";
    LAUNCH_FAILED = 719, c"CUDA_ERROR_LAUNCH_FAILED", c"cudaErrorLaunchFailure",
        c"unspecified launch failure";
    COOPERATIVE_LAUNCH_TOO_LARGE = 720, c"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", c"cudaErrorCooperativeLaunchTooLarge",
        c"too many blocks in cooperative launch";
    TENSOR_MEMORY_LEAK = 721, c"CUDA_ERROR_TENSOR_MEMORY_LEAK", c"cudaErrorTensorMemoryLeak",
        c"tensor memory not completely freed";
    NOT_PERMITTED = 800, c"CUDA_ERROR_NOT_PERMITTED", c"cudaErrorNotPermitted", c"operation not permitted";
    NOT_SUPPORTED = 801, c"CUDA_ERROR_NOT_SUPPORTED", c"cudaErrorNotSupported", c"operation not supported";
    SYSTEM_NOT_READY = 802, c"CUDA_ERROR_SYSTEM_NOT_READY", c"cudaErrorSystemNotReady",
        c"system not yet initialized";
    SYSTEM_DRIVER_MISMATCH = 803, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", c"cudaErrorSystemDriverMismatch",
        c"system has unsupported display driver / cuda driver combination";
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804, c"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", c"cudaErrorCompatNotSupportedOnDevice",
        c"forward compatibility was attempted on non supported HW";
    MPS_CONNECTION_FAILED = 805, c"CUDA_ERROR_MPS_CONNECTION_FAILED", c"cudaErrorMpsConnectionFailed",
        c"MPS client failed to connect to the MPS control daemon or the MPS server";
    MPS_RPC_FAILURE = 806, c"CUDA_ERROR_MPS_RPC_FAILURE", c"cudaErrorMpsRpcFailure",
        c"the remote procedural call between the MPS server and the MPS client failed";
    MPS_SERVER_NOT_READY = 807, c"CUDA_ERROR_MPS_SERVER_NOT_READY", c"cudaErrorMpsServerNotReady",
        c"MPS server is not ready to accept new MPS client requests";
    MPS_MAX_CLIENTS_REACHED = 808, c"CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", c"cudaErrorMpsMaxClientsReached",
        c"the hardware resources required to create MPS client have been exhausted";
    MPS_MAX_CONNECTIONS_REACHED = 809, c"CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", c"cudaErrorMpsMaxConnectionsReached",
        c"the hardware resources required to support device connections have been exhausted";
    MPS_CLIENT_TERMINATED = 810, c"CUDA_ERROR_MPS_CLIENT_TERMINATED", c"cudaErrorMpsClientTerminated",
        c"the MPS client has been terminated by the server";
    CDP_NOT_SUPPORTED = 811, c"CUDA_ERROR_CDP_NOT_SUPPORTED", c"cudaErrorCdpNotSupported",
        c"the program is using CUDA Dynamic Parallelism, but the current configuration does not support it";
    CDP_VERSION_MISMATCH = 812, c"CUDA_ERROR_CDP_VERSION_MISMATCH", c"cudaErrorCdpVersionMismatch",
        c"the program contains an unsupported interaction between different versions of CUDA Dynamic Parallelism";
    CAPTURE_UNSUPPORTED = 900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"cudaErrorStreamCaptureUnsupported",
        c"operation not permitted when stream is capturing";
    CAPTURE_INVALIDATED = 901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"cudaErrorStreamCaptureInvalidated",
        c"operation failed due to a previous error during capture";
    CAPTURE_MERGE = 902, c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"cudaErrorStreamCaptureMerge",
        c"operation would result in a merge of separate capture sequences";
    CAPTURE_UNMATCHED = 903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"cudaErrorStreamCaptureUnmatched",
        c"capture was not ended in the same stream as it began";
    CAPTURE_UNJOINED = 904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"cudaErrorStreamCaptureUnjoined",
        c"capturing stream has unjoined work";
    CAPTURE_ISOLATION = 905, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"cudaErrorStreamCaptureIsolation",
        c"dependency created on uncaptured work in another stream";
    CAPTURE_IMPLICIT = 906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"cudaErrorStreamCaptureImplicit",
        c"operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, c"CUDA_ERROR_CAPTURED_EVENT", c"cudaErrorCapturedEvent",
        c"operation not permitted on an event last recorded in a capturing stream";
    CAPTURE_WRONG_THREAD = 908, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"cudaErrorStreamCaptureWrongThread",
        c"attempt to terminate a thread-local capture sequence from another thread";
    TIMEOUT = 909, c"CUDA_ERROR_TIMEOUT", c"cudaErrorTimeout", c"wait operation timed out";
    GRAPH_EXEC_UPDATE_FAILURE = 910, c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", c"cudaErrorGraphExecUpdateFailure",
        c"the graph update was not performed because it included changes which violated constraints specific to instantiated graph update";
    EXTERNAL_DEVICE = 911, c"CUDA_ERROR_EXTERNAL_DEVICE", c"cudaErrorExternalDevice",
        c"an async error has occured in external entity outside of CUDA";
    INVALID_CLUSTER_SIZE = 912, c"CUDA_ERROR_INVALID_CLUSTER_SIZE", c"cudaErrorInvalidClusterSize",
        c"cluster misconfiguration";
    FUNCTION_NOT_LOADED = 913, c"CUDA_ERROR_FUNCTION_NOT_LOADED", c"cudaErrorFunctionNotLoaded",
        c"the function handle is not loaded";
    INVALID_RESOURCE_TYPE = 914, c"CUDA_ERROR_INVALID_RESOURCE_TYPE", c"cudaErrorInvalidResourceType",
        c"one or more resources passed in are not valid resource types for the operation";
    INVALID_RESOURCE_CONFIGURATION = 915, c"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", c"cudaErrorInvalidResourceConfiguration",
        c"one or more resources are insufficient or non-applicable for the operation";
    KEY_ROTATION = 916, c"CUDA_ERROR_KEY_ROTATION", c"cudaErrorUnknown",
        c"the requested operation is not permitted because the key rotation sequence failed";
    STREAM_DETACHED = 917, c"CUDA_ERROR_STREAM_DETACHED", c"cudaErrorStreamDetached",
        c"the requested operation is not permitted because the stream is in a detached state";
    UNKNOWN = 999, c"CUDA_ERROR_UNKNOWN", c"cudaErrorUnknown", c"unknown error";
}

/// The names of a code and what it means.
#[derive(Clone, Copy)]
pub struct Meaning {
    pub driver: &'static std::ffi::CStr,
    pub runtime: &'static std::ffi::CStr,
    pub text: &'static std::ffi::CStr,
}

/// What a code means, if it is one of those that are known here.
pub fn meaning(code: Code) -> Option<Meaning> {
    let &(_, driver, runtime, text) = TABLE.iter().find(|entry| entry.0 == code)?;
    Some(Meaning { driver, runtime, text })
}
