//! Debugging: the owners of units and the call sites of their allocation.

use std::sync::Arc;
use std::time::Instant;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyString};

use crate::index::{CallGuard, CallRecord, Owner};
use crate::pool::{Occupancy, Pool as Contract};

use super::args::kind_of;
use super::environment;

/// A module with this global is skipped when a call site is determined: its caller counts.
const ACTS_FOR_CALLERS: &str = "_acts_for_callers";

/// Whether a pool records owners and call sites.
#[derive(Clone, Copy, Debug)]
pub(super) struct Debug {
    is_on: bool,
}

impl Debug {
    /// The setting for pools that hand out nothing.
    pub(super) const OFF: Self = Self { is_on: false };

    /// Reads the argument `debug` or, without it, the environment variable `KVPOOL_DEBUG`. Opens the pool's
    /// ledger if debugging is on.
    pub(super) fn new(wanted: Option<bool>, pool: &impl Contract) -> Self {
        let debug = Self::without_ledger(wanted);
        if debug.is_on {
            pool.keep_ledger();
        }
        debug
    }

    /// Works like [`Self::new`], for a pool that poisons memory but whose units have no owners.
    pub(super) fn without_ledger(wanted: Option<bool>) -> Self {
        Self { is_on: wanted.unwrap_or_else(is_wanted_everywhere) }
    }

    pub(super) const fn is_on(self) -> bool {
        self.is_on
    }

    /// Attributes this thread's calls to `owner` and the caller's line until the returned guard is dropped.
    /// Does nothing if the pool does not debug.
    #[inline]
    pub(super) fn begin(
        self,
        py: Python<'_>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<CallGuard>> {
        if self.is_on || owner.is_some() { self.begin_call(py, owner) } else { Ok(None) }
    }

    #[cold]
    fn begin_call(self, py: Python<'_>, owner: Option<&Bound<'_, PyAny>>) -> PyResult<Option<CallGuard>> {
        if let Some(owner) = owner
            && !owner.is_instance_of::<PyString>()
            && !owner.is_instance_of::<PyInt>()
        {
            let kind = kind_of(owner);
            return Err(PyTypeError::new_err(format!("owner must be a str or an int, not {kind}")));
        }
        if !self.is_on {
            return Ok(None);
        }
        let owner = owner.map(to_owner).transpose()?;
        let site = call_site(py)?.unwrap_or_else(|| CallRecord::UNKNOWN_SITE.to_owned());
        Ok(Some(Arc::new(CallRecord::new(owner, &site)).begin()))
    }
}

/// Returns whether `KVPOOL_DEBUG` turns debugging on for all pools.
fn is_wanted_everywhere() -> bool {
    environment::is_one_of("KVPOOL_DEBUG", &["1", "true", "yes", "on"])
}

/// Converts an owner, which is a str or an int.
fn to_owner(object: &Bound<'_, PyAny>) -> PyResult<Owner> {
    if let Ok(text) = object.cast::<PyString>() {
        return Ok(Owner::Text(text.to_string()));
    }
    // A bool or another subclass of int becomes a plain int.
    let number = object.py().get_type::<PyInt>().call1((object,))?;
    Ok(Owner::Number(number.str()?.to_string()))
}

/// Returns the call site: file, line and function; `None` if no Python frame is active, for example at the
/// start of a thread.
fn call_site(py: Python<'_>) -> PyResult<Option<String>> {
    let Ok(mut frame) = py.import("sys")?.getattr("_getframe")?.call0() else { return Ok(None) };
    loop {
        let back = frame.getattr("f_back")?;
        if back.is_none() || !frame.getattr("f_globals")?.contains(ACTS_FOR_CALLERS)? {
            break;
        }
        frame = back;
    }
    let code = frame.getattr("f_code")?;
    let (file, function) = (code.getattr("co_filename")?, code.getattr("co_name")?);
    Ok(Some(format!("{file}:{} in {function}", frame.getattr("f_lineno")?)))
}

/// A holder of units: owner, call site, age in seconds, and the number of the call.
type Holder<'py> = (Option<Bound<'py, PyAny>>, String, f64, u64);
/// First, end, state, bytes (if units differ in size), holders.
type SpanTuple<'py> = (usize, usize, &'static str, Option<usize>, Vec<Holder<'py>>);
/// The result of `Pool._occupancy`: spans, and the numbers of lifetimes below 1, 2, 4, ... microseconds.
pub(super) type OccupancyTuple<'py> = (Vec<SpanTuple<'py>>, Vec<u64>);

/// Converts the occupancy of a pool to Python objects.
pub(super) fn occupancy<'py>(py: Python<'py>, occupancy: Occupancy) -> PyResult<OccupancyTuple<'py>> {
    // One moment for all, so that ages are in the order of the calls.
    let now = Instant::now();
    let holder = |call: &Arc<CallRecord>| -> PyResult<Holder<'py>> {
        let owner = match &call.owner {
            None => None,
            Some(Owner::Text(text)) => Some(PyString::new(py, text).into_any()),
            Some(Owner::Number(number)) => Some(py.get_type::<PyInt>().call1((number,))?),
        };
        Ok((owner, call.site.to_string(), call.age(now).as_secs_f64(), call.number))
    };
    let spans = occupancy.pieces.iter().map(|piece| {
        let holders = piece.holders.iter().map(holder).collect::<PyResult<_>>()?;
        Ok((piece.range.start, piece.range.end, piece.state.name(), piece.bytes, holders))
    });
    Ok((spans.collect::<PyResult<_>>()?, occupancy.lifetimes))
}
