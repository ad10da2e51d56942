//! Captures of streams and the graphs that they become.

use std::ffi::{c_int, c_ulonglong};

use crate::codes::{INVALID_VALUE, NOT_SUPPORTED};
use crate::driver::{Info, put};
use crate::operations::check;
use crate::threads::Mode;

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
        let found = call.state.capture_info(call.device, stream)?;
        let to = Info { status, id, graph, dependencies, edges, count };
        to.put(found)
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
