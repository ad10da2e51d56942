//! `kvpool.Segment`, and the events of a prefix cache: `kvpool.Stored`, `kvpool.Removed` and
//! `kvpool.Cleared`.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::cache::{CacheEvent, Namespace, PageHash, Segment as Part, SegmentState, Tier};

use super::page_keys::namespace_to_py;

/// A part of a prompt: where it is cached, or why it is not.
#[pyclass(frozen, module = "kvpool", name = "Segment")]
pub(super) struct Segment(pub(super) Part);

#[pymethods]
impl Segment {
    /// The first position.
    #[getter]
    const fn begin(&self) -> usize {
        self.0.range.start
    }

    /// One past the last position.
    #[getter]
    const fn end(&self) -> usize {
        self.0.range.end
    }

    /// The place where it is cached, "device", "host" or "store", or the reason why it is not found: "no snapshot"
    /// (cached, but without a snapshot of the state at its end), "evicted", "other namespace", "never published", or
    /// "page not full".
    #[getter]
    const fn state(&self) -> &'static str {
        match &self.0.state {
            SegmentState::Device => Tier::Device.name(),
            SegmentState::Host => Tier::Host.name(),
            SegmentState::Store => "store",
            SegmentState::NoSnapshot => "no snapshot",
            SegmentState::Evicted(_) => "evicted",
            SegmentState::Elsewhere(_) => "other namespace",
            SegmentState::NeverPublished => "never published",
            SegmentState::PageNotFull => "page not full",
        }
    }

    /// The cause of the eviction, if the segment was evicted: "alloc" for an allocation that was short,
    /// "evict" and "clear" for these calls.
    #[getter]
    const fn pressure(&self) -> Option<&'static str> {
        match &self.0.state {
            SegmentState::Evicted(gone) => Some(gone.cause.pressure.name()),
            _ => None,
        }
    }

    /// Seconds since the eviction, if the segment was evicted.
    #[getter]
    fn evicted_s(&self) -> Option<f64> {
        match &self.0.state {
            SegmentState::Evicted(gone) => Some(gone.cause.at.elapsed().as_secs_f64()),
            _ => None,
        }
    }

    /// The age of evicted pages: the tokens looked up between their last use and their eviction. `None` for others.
    #[getter]
    const fn idle_tokens(&self) -> Option<u64> {
        match &self.0.state {
            SegmentState::Evicted(gone) => Some(gone.idle),
            _ => None,
        }
    }

    /// The other namespace that has the segment.
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match &self.0.state {
            SegmentState::Elsewhere(name) => namespace_to_py(py, name),
            _ => Ok(None),
        }
    }

    fn __repr__(&self) -> String {
        let (begin, end, state) = (self.begin(), self.end(), self.state());
        let more = match &self.0.state {
            SegmentState::Evicted(gone) => format!(
                ", pressure='{}', {:.1} s ago, {} tokens after its last use",
                gone.cause.pressure.name(),
                gone.cause.at.elapsed().as_secs_f64(),
                gone.idle
            ),
            SegmentState::Elsewhere(name) => format!(", namespace={name}"),
            _ => String::new(),
        };
        format!("Segment({begin}..{end}, '{state}'{more})")
    }
}

/// Consecutive pages were stored.
#[pyclass(frozen, module = "kvpool", name = "Stored")]
pub(super) struct Stored {
    pages: Vec<PageHash>,
    parent: Option<PageHash>,
    /// The token ids of the pages.
    #[pyo3(get)]
    tokens: Vec<i32>,
    namespace: Namespace,
    tier: Tier,
}

#[pymethods]
impl Stored {
    /// The keys of the pages, each of 32 bytes: BLAKE3 of the key before and the tokens of the page, as int32 in little
    /// endian. Before the first page, it is that of the page size, as uint64, a byte for the kind of the namespace (0:
    /// None, 1: an int, 2: a str, 3: bytes) and the namespace, an int in decimal.
    #[getter]
    fn pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        keys(py, &self.pages)
    }

    /// The key of the previous page; `None` at the beginning of a prompt.
    #[getter]
    fn parent<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.parent.as_ref().map(|key| PyBytes::new(py, key))
    }

    /// The namespace of the pages.
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        namespace_to_py(py, &self.namespace)
    }

    /// The tier of the pages: "device" or "host".
    #[getter]
    const fn tier(&self) -> &'static str {
        self.tier.name()
    }

    fn __repr__(&self) -> String {
        let (pages, tokens) = (self.pages.len(), self.tokens.len());
        let (namespace, tier) = (&self.namespace, self.tier());
        format!("Stored({pages} pages, {tokens} tokens, namespace={namespace}, tier='{tier}')")
    }
}

/// Pages were removed.
#[pyclass(frozen, module = "kvpool", name = "Removed")]
pub(super) struct Removed {
    pages: Vec<PageHash>,
    tier: Tier,
}

#[pymethods]
impl Removed {
    /// The keys of the pages.
    #[getter]
    fn pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        keys(py, &self.pages)
    }

    /// The tier of the pages: "device" or "host".
    #[getter]
    const fn tier(&self) -> &'static str {
        self.tier.name()
    }

    fn __repr__(&self) -> String {
        format!("Removed({} pages, tier='{}')", self.pages.len(), self.tier())
    }
}

/// The cache is empty now, or a reader fell so far behind that events were lost: it starts over with an empty index.
#[pyclass(frozen, module = "kvpool", name = "Cleared")]
pub(super) struct Cleared;

#[pymethods]
impl Cleared {
    const fn __repr__(_slf: &Bound<'_, Self>) -> &'static str {
        "Cleared()"
    }
}

fn keys<'py>(py: Python<'py>, keys: &[PageHash]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, keys.iter().map(|key| PyBytes::new(py, key)))
}

/// Converts an event to a Python object.
pub(super) fn event_to_py(py: Python<'_>, event: CacheEvent) -> PyResult<Py<PyAny>> {
    Ok(match event {
        CacheEvent::Stored { pages, parent, tokens, namespace, tier } => {
            Py::new(py, Stored { pages, parent, tokens, namespace, tier })?.into_any()
        }
        CacheEvent::Removed { pages, tier } => Py::new(py, Removed { pages, tier })?.into_any(),
        CacheEvent::Cleared => Py::new(py, Cleared)?.into_any(),
    })
}
