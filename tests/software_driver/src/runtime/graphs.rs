//! Captures of streams and the graphs that they become.

use std::ffi::{c_int, c_ulonglong};

use crate::capture::Status;
use crate::codes::{INVALID_VALUE, NOT_SUPPORTED, Outcome};
use crate::driver::put;
use crate::operations::check;
use crate::threads::Mode;

/// Writes an answer that the caller need not want.
fn put_if_wanted<T>(target: *mut T, value: T) -> Outcome {
    if target.is_null() { Ok(()) } else { put(target, value) }
}

super::exports! {
    Context cudaStreamBeginCapture(stream: usize, mode: c_int) |call| {
        let mode = Mode::new(mode).ok_or(INVALID_VALUE)?;
        let id = call.state.streams.resolve(stream, call.device)?;
        call.state.streams.begin_capture(id, mode)
    };
    Context cudaStreamEndCapture(stream: usize, graph: *mut usize) |call| {
        check(!graph.is_null(), INVALID_VALUE)?;
        put(graph, 0)?;
        let id = call.state.streams.resolve(stream, call.device)?;
        put(graph, call.state.streams.end_capture(id)?)
    };
    Context cudaStreamGetCaptureInfo(
        stream: usize,
        status: *mut c_int,
        id: *mut c_ulonglong,
        graph: *mut usize,
        dependencies: *mut usize,
        edges: *mut usize,
        count: *mut usize,
    ) |call| {
        let found = call.state.capture_status(call.device, stream)?;
        let at = call.state.streams.resolve(stream, call.device)?;
        put(status, found as c_int)?;
        if found == Status::Active {
            // A graph has the number of its capture. What its work depends on is not kept.
            let capture = call.state.streams.capture_of(at).unwrap_or(0);
            put_if_wanted(id, capture as c_ulonglong)?;
            put_if_wanted(graph, capture)?;
            put_if_wanted(dependencies, 0)?;
            put_if_wanted(edges, 0)?;
            put_if_wanted(count, 0)?;
        }
        Ok(())
    };
    Context cudaGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) |call| {
        // Their number only.
        check(nodes.is_null(), NOT_SUPPORTED)?;
        put(count, call.state.streams.captures.graph(graph)?.len())
    };
    // A graph is run as it is: what is made of it has its number.
    Context cudaGraphInstantiate(made: *mut usize, graph: usize, _flags: c_ulonglong) |call| {
        call.state.streams.captures.graph(graph)?;
        put(made, graph)
    };
    Context cudaGraphInstantiateWithFlags(made: *mut usize, graph: usize, _flags: c_ulonglong) |call| {
        call.state.streams.captures.graph(graph)?;
        put(made, graph)
    };
    Context cudaGraphLaunch(graph: usize, stream: usize) |call| {
        let id = call.state.streams.resolve(stream, call.device)?;
        call.state.streams.replay(graph, id)
    };
    Context cudaGraphDestroy(graph: usize) |call| call.state.streams.captures.graph(graph).map(|_| ());
    Context cudaGraphExecDestroy(graph: usize) |call| call.state.streams.captures.graph(graph).map(|_| ());
    Context cudaGraphUpload(graph: usize, _stream: usize) |call| {
        call.state.streams.captures.graph(graph).map(|_| ())
    };
}
