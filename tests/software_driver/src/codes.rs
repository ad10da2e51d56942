//! The numbers with which the driver answers or which tests let it answer, and their names.

/// `CUresult`, and with the same numbers `cudaError_t`.
pub type Code = i32;

/// Internal, never returned to a caller: the call has done nothing, and waits until the gate of a stream opens.
pub const BLOCKED: Code = -1;

/// The result of a call, or why it fails.
pub type Outcome<T = ()> = Result<T, Code>;

/// Defines the codes, and a table of number, driver's name, runtime's name and text.
macro_rules! codes {
    ($($name:ident = $number:literal, $driver:literal, $runtime:literal, $text:literal;)*) => {
        $(#[allow(dead_code, reason = "tests plan some by their numbers")]
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
    CALL_REQUIRES_NEWER_DRIVER = 36, c"CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", c"cudaErrorCallRequiresNewerDriver",
        c"API call is not supported in the installed CUDA driver";
    NO_DEVICE = 100, c"CUDA_ERROR_NO_DEVICE", c"cudaErrorNoDevice", c"no CUDA-capable device is detected";
    INVALID_DEVICE = 101, c"CUDA_ERROR_INVALID_DEVICE", c"cudaErrorInvalidDevice", c"invalid device ordinal";
    INVALID_IMAGE = 200, c"CUDA_ERROR_INVALID_IMAGE", c"cudaErrorInvalidKernelImage",
        c"device kernel image is invalid";
    INVALID_CONTEXT = 201, c"CUDA_ERROR_INVALID_CONTEXT", c"cudaErrorDeviceUninitialized",
        c"invalid device context";
    MAP_FAILED = 205, c"CUDA_ERROR_MAP_FAILED", c"cudaErrorMapBufferObjectFailed",
        c"mapping of buffer object failed";
    NO_BINARY_FOR_GPU = 209, c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"cudaErrorNoKernelImageForDevice",
        c"no kernel image is available for execution on the device";
    INVALID_PTX = 218, c"CUDA_ERROR_INVALID_PTX", c"cudaErrorInvalidPtx", c"a PTX JIT compilation failed";
    UNSUPPORTED_PTX = 222, c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", c"cudaErrorUnsupportedPtxVersion",
        c"the provided PTX was compiled with an unsupported toolchain.";
    UNSUPPORTED_DEVSIDE_SYNC = 225, c"CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC", c"cudaErrorUnsupportedDevSideSync",
        c"the provided PTX contains unsupported call to cudaDeviceSynchronize";
    CONTAINED = 226, c"CUDA_ERROR_CONTAINED", c"cudaErrorContained",
        c"Invalid access of peer GPU memory over nvlink or a hardware error";
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
    ALREADY_REGISTERED = 712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"cudaErrorHostMemoryAlreadyRegistered",
        c"part or all of the requested memory range is already mapped";
    NOT_REGISTERED = 713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"cudaErrorHostMemoryNotRegistered",
        c"pointer does not correspond to a registered memory region";
    LAUNCH_FAILED = 719, c"CUDA_ERROR_LAUNCH_FAILED", c"cudaErrorLaunchFailure",
        c"unspecified launch failure";
    TENSOR_MEMORY_LEAK = 721, c"CUDA_ERROR_TENSOR_MEMORY_LEAK", c"cudaErrorTensorMemoryLeak",
        c"tensor memory not completely freed";
    NOT_SUPPORTED = 801, c"CUDA_ERROR_NOT_SUPPORTED", c"cudaErrorNotSupported", c"operation not supported";
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
    FUNCTION_NOT_LOADED = 913, c"CUDA_ERROR_FUNCTION_NOT_LOADED", c"cudaErrorFunctionNotLoaded",
        c"the function handle is not loaded";
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

/// The meaning of a code, if it is one of those that are known here.
pub fn meaning(code: Code) -> Option<Meaning> {
    let &(_, driver, runtime, text) = TABLE.iter().find(|entry| entry.0 == code)?;
    Some(Meaning { driver, runtime, text })
}
