//! Captures of streams and the graphs that they become.

use std::ffi::{c_int, c_ulonglong};

use crate::capture::Status;
use crate::codes::{INVALID_VALUE, Outcome};
use crate::operations::check;
use crate::threads::Mode;

use super::put;

/// Where `cuStreamGetCaptureInfo` and its counterpart of the runtime write their answers.
pub struct Info {
    pub status: *mut c_int,
    pub id: *mut c_ulonglong,
    pub graph: *mut usize,
    pub dependencies: *mut usize,
    pub edges: *mut usize,
    pub count: *mut usize,
}

impl Info {
    /// Writes the answers that the caller wants. What the work of a capture depends on is not kept.
    pub fn put(&self, (status, capture): (Status, usize)) -> Outcome {
        put(self.status, status as c_int)?;
        if status != Status::Active {
            return Ok(());
        }
        // A graph has the number of its capture.
        put_if_wanted(self.id, capture as c_ulonglong)?;
        put_if_wanted(self.graph, capture)?;
        for target in [self.dependencies, self.edges, self.count] {
            put_if_wanted(target, 0)?;
        }
        Ok(())
    }
}

/// Writes an answer that the caller need not want.
fn put_if_wanted<T>(target: *mut T, value: T) -> Outcome {
    if target.is_null() { Ok(()) } else { put(target, value) }
}

super::exports! {
    Context cuStreamBeginCapture_v2(stream: usize, mode: c_int) |call| {
        let mode = Mode::new(mode).ok_or(INVALID_VALUE)?;
        let id = call.state.streams.resolve(stream, call.device)?;
        call.state.streams.begin_capture(id, mode)
    };
    Context cuStreamEndCapture(stream: usize, graph: *mut usize) |call| {
        check(!graph.is_null(), INVALID_VALUE)?;
        put(graph, 0)?;
        let id = call.state.streams.resolve(stream, call.device)?;
        put(graph, call.state.streams.end_capture(id)?)
    };
    Context cuStreamGetCaptureInfo_v2(
        stream: usize,
        status: *mut c_int,
        id: *mut c_ulonglong,
        graph: *mut usize,
        dependencies: *mut usize,
        count: *mut usize,
    ) |call| {
        let found = call.state.capture_info(call.device, stream)?;
        let edges = std::ptr::null_mut();
        Info { status, id, graph, dependencies, edges, count }.put(found)
    };
    // A graph is run as it is: what is made of it has its number.
    Context cuGraphInstantiateWithFlags(made: *mut usize, graph: usize, _flags: c_ulonglong) |call| {
        call.state.streams.captures.graph(graph)?;
        put(made, graph)
    };
    Context cuGraphLaunch(graph: usize, stream: usize) |call| {
        let id = call.state.streams.resolve(stream, call.device)?;
        call.state.streams.replay(graph, id)
    };
    Context cuGraphDestroy(graph: usize) |call| call.state.streams.captures.graph(graph).map(|_| ());
    Context cuGraphExecDestroy(graph: usize) |call| call.state.streams.captures.graph(graph).map(|_| ());
}
