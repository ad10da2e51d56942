//! Captures of streams and the graphs that they become.

use std::ffi::{c_int, c_ulonglong};

use crate::capture::Status;
use crate::codes::{NOT_SUPPORTED, Outcome};
use crate::driver::put;
use crate::operations::check;

/// Writes an answer that the caller need not want.
fn put_if_wanted<T>(target: *mut T, value: T) -> Outcome {
    if target.is_null() { Ok(()) } else { put(target, value) }
}

super::exports! {
    Context cudaStreamBeginCapture(stream: usize, mode: c_int) |call| {
        call.state.begin_capture(call.device, stream, mode)
    };
    Context cudaStreamEndCapture(stream: usize, graph: *mut usize) |call| {
        put(graph, 0)?;
        put(graph, call.state.end_capture(call.device, stream)?)
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
        let (found, capture) = call.state.capture_info(call.device, stream)?;
        put(status, found as c_int)?;
        if found == Status::Active {
            // A graph has the number of its capture. What the work of a capture depends on is not kept.
            put_if_wanted(id, capture as c_ulonglong)?;
            put_if_wanted(graph, capture)?;
            for target in [dependencies, edges, count] {
                put_if_wanted(target, 0)?;
            }
        }
        Ok(())
    };
    Context cudaGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) |call| {
        // The number of nodes only.
        check(nodes.is_null(), NOT_SUPPORTED)?;
        put(count, call.state.streams.captures.graph(graph)?.len())
    };
    // A graph is run as it is: what is made of it has its number.
    Context cudaGraphInstantiate(made: *mut usize, graph: usize, _flags: c_ulonglong) |call| {
        put(made, call.state.streams.captures.graph(graph).map(|_| graph)?)
    };
    Context cudaGraphInstantiateWithFlags(made: *mut usize, graph: usize, _flags: c_ulonglong) |call| {
        put(made, call.state.streams.captures.graph(graph).map(|_| graph)?)
    };
    Context cudaGraphLaunch(graph: usize, stream: usize) |call| {
        let id = call.state.streams.resolve(stream, call.device)?;
        call.state.streams.replay(graph, id)
    };
    Context cudaGraphDestroy(graph: usize) |call| call.state.streams.captures.graph(graph).map(|_| ());
    Context cudaGraphExecDestroy(graph: usize) |call| call.state.streams.captures.graph(graph).map(|_| ());
}
