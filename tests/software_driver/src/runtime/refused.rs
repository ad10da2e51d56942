//! The functions of the runtime that PyTorch may call and that cannot be done here: launches of its kernels above all.
//!
//! The real functions would look for a real driver, so all that PyTorch imports are here.

use crate::codes::{Code, NOT_SUPPORTED, SUCCESS};

use super::told;

/// Defines functions that refuse, whatever their arguments are: the caller removes those from the stack.
macro_rules! refused {
    ($($name:ident)*) => {
        $(#[unsafe(no_mangle)]
        extern "C" fn $name() -> Code {
            told(NOT_SUPPORTED)
        })*
    };
}

/// Finds the kernel of a function, which is not looked at before it is launched.
#[unsafe(no_mangle)]
extern "C" fn __cudaGetKernel(kernel: *mut usize, function: usize) -> Code {
    if !kernel.is_null() {
        // SAFETY: the caller gives a place for the answer.
        unsafe { kernel.write(function) };
    }
    SUCCESS
}

refused! {
    __cudaLaunchKernel
    __cudaPopCallConfiguration
    __cudaPushCallConfiguration
    cudaDeviceDisablePeerAccess
    cudaDeviceEnablePeerAccess
    cudaDeviceGetDefaultMemPool
    cudaDeviceGetGraphMemAttribute
    cudaDeviceSetGraphMemAttribute
    cudaFreeAsync
    cudaFuncGetAttributes
    cudaFuncSetAttribute
    cudaGetSymbolAddress
    cudaGraphAddNode
    cudaGraphConditionalHandleCreate
    cudaGraphDebugDotPrint
    cudaGraphNodeGetDependencies
    cudaGraphRetainUserObject
    cudaIpcCloseMemHandle
    cudaIpcGetEventHandle
    cudaIpcGetMemHandle
    cudaIpcOpenEventHandle
    cudaIpcOpenMemHandle
    cudaKernelSetAttributeForDevice
    cudaLaunchCooperativeKernel
    cudaLaunchHostFunc
    cudaLaunchKernel
    cudaLaunchKernelExC
    cudaLibraryGetGlobal
    cudaLibraryGetKernel
    cudaLibraryGetKernelCount
    cudaLibraryGetManaged
    cudaLibraryGetUnifiedFunction
    cudaLibraryLoadData
    cudaLibraryLoadFromFile
    cudaLibraryUnload
    cudaMallocAsync
    cudaMallocManaged
    cudaMemPoolGetAttribute
    cudaMemPoolSetAccess
    cudaMemPoolSetAttribute
    cudaMemPoolTrimTo
    cudaMemcpy2D
    cudaMemcpy2DAsync
    cudaMemcpyToSymbol
    cudaOccupancyMaxActiveBlocksPerMultiprocessor
    cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
    cudaStreamAddCallback
    cudaStreamBeginCaptureToGraph
    cudaStreamUpdateCaptureDependencies
    cudaUserObjectCreate
    cudaUserObjectRelease
}
