use super::kernels::{five, function, launch};
use super::{
    Fresh, allocate, cuFuncGetAttribute, cuFuncIsLoaded, cuFuncLoad, cuStreamBeginCapture_v2,
    cuStreamEndCapture, cuThreadExchangeStreamCaptureMode, ok, soft_set_lazy, stream,
};
use crate::codes::{CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, INVALID_HANDLE};

fn is_loaded(function: usize) -> bool {
    let mut state = -1;
    ok(cuFuncIsLoaded(&raw mut state, function));
    state == 1
}

#[test]
fn functions_are_loaded_when_they_are_needed() {
    let _fresh = Fresh::with_context();
    let (function, out) = (function(), allocate(8));
    assert!(!is_loaded(function));
    ok(cuFuncGetAttribute(&mut 0, 4, function));
    assert!(!is_loaded(function));
    ok(launch(function, 1, 256, &five(out), 0));
    assert!(is_loaded(function));
}

#[test]
fn functions_are_loaded_on_request() {
    for load in [|function| cuFuncLoad(function), |function| cuFuncGetAttribute(&mut 0, 0, function)] {
        let _fresh = Fresh::with_context();
        let function = function();
        ok(load(function));
        assert!(is_loaded(function));
        assert_eq!(load(function + 1), INVALID_HANDLE);
    }
    let _fresh = Fresh::with_context();
    soft_set_lazy(0);
    assert!(is_loaded(function()));
}

#[test]
fn nothing_is_loaded_in_a_capture() {
    let _fresh = Fresh::with_context();
    let (function, out, first) = (function(), allocate(8), stream());
    for mode in [0, 2] {
        ok(cuStreamBeginCapture_v2(first, mode));
        assert_eq!(launch(function, 1, 256, &five(out), first), CAPTURE_UNSUPPORTED);
        assert_eq!((cuStreamEndCapture(first, &mut 0), is_loaded(function)), (CAPTURE_INVALIDATED, false));
    }
    ok(cuStreamBeginCapture_v2(first, 0));
    assert_eq!(cuFuncLoad(function), CAPTURE_UNSUPPORTED);
    assert_eq!(cuStreamEndCapture(first, &mut 0), CAPTURE_INVALIDATED);
    // Beside one it can be, if the thread takes care of what it does.
    ok(cuStreamBeginCapture_v2(first, 0));
    let mut mode = 2;
    ok(cuThreadExchangeStreamCaptureMode(&raw mut mode));
    ok(cuFuncLoad(function));
    ok(cuThreadExchangeStreamCaptureMode(&raw mut mode));
    ok(launch(function, 1, 256, &five(out), first));
    ok(cuStreamEndCapture(first, &mut 0));
}
