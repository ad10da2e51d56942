//! `kvpool.Segment`, and the events of a prefix cache: `kvpool.Stored`, `kvpool.Removed` and
//! `kvpool.Cleared`.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::cache::{CacheEvent, EventGroup, Namespace, PageHash, Segment as Part, SegmentState, Tier, Worth};
use crate::layout::GroupKind;

use super::page_keys::namespace_to_py;

/// A part of a prompt: where it is cached, or why it is not.
#[pyclass(frozen, module = "kvpool", name = "Segment")]
pub(super) struct Segment(pub(super) Part);

impl Segment {
    const fn judged(&self) -> Option<Worth> {
        match &self.0.state {
            SegmentState::Evicted(gone) => gone.worth,
            _ => None,
        }
    }
}

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

    /// What the adaptive policy expected of the evicted pages: the uses of a token while as many tokens are
    /// looked up as the cache has; with a `cost`, times the seconds that a use saves. `None` if it evicted the
    /// least recently used pages, and for other policies and segments.
    #[getter]
    fn worth(&self) -> Option<f64> {
        self.judged().map(|worth| worth.victim)
    }

    /// The least `worth` of pages of another class, position or age that the cache kept; infinite if there were none.
    #[getter]
    fn least_kept_worth(&self) -> Option<f64> {
        self.judged().map(|worth| worth.least_kept)
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
                ", pressure='{}', {:.1} s ago, {} tokens after its last use{}",
                gone.cause.pressure.name(),
                gone.cause.at.elapsed().as_secs_f64(),
                gone.idle,
                gone.worth.map_or_else(String::new, |Worth { victim, least_kept }| format!(
                    ", worth {victim:.3e} where {least_kept:.3e} was kept"
                ))
            ),
            SegmentState::Elsewhere(name) => format!(", namespace={name}"),
            _ => String::new(),
        };
        format!("Segment({begin}..{end}, '{state}'{more})")
    }
}

/// Consecutive pages were stored, or consecutive units of a group of an `ArenaPrefixCache`.
#[pyclass(frozen, module = "kvpool", name = "Stored")]
pub(super) struct Stored {
    pages: Vec<PageHash>,
    parent: Option<PageHash>,
    /// The token ids of the pages or units, the same number for each: for a unit of several pages those of all, for a
    /// snapshot of a state those of the page at whose end it is.
    #[pyo3(get)]
    tokens: Vec<i32>,
    namespace: Namespace,
    tier: Tier,
    group: Option<Arc<EventGroup>>,
}

#[pymethods]
impl Stored {
    /// The keys of the pages, each of 32 bytes; of units, the keys of the pages that they end with. A key is BLAKE3 of the key before and the tokens of the page, as int32 in little
    /// endian. Before the first page, it is that of the page size, as uint64, a byte for the kind of the namespace (0:
    /// None, 1: an int, 2: a str, 3: bytes) and the namespace, an int in decimal.
    #[getter]
    fn pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        keys(py, &self.pages)
    }

    /// The key of the page before `tokens`; `None` at the beginning of a prompt.
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

    /// The name of the group whose units were stored; `None` for pages, which are those of a `PrefixCache`, and those of an
    /// `ArenaPrefixCache` that has no full group with a unit for every page.
    #[getter]
    fn group(&self) -> Option<&str> {
        self.group.as_ref().map(|group| &group.name[..])
    }

    /// The kind of the group: "full", "window", "chunk" or "state"; `None` for pages.
    #[getter]
    fn kind(&self) -> Option<&'static str> {
        self.group.as_ref().map(|group| group.kind.name())
    }

    /// The tokens of the window or chunk of the group; `None` for others. `Group.tokens` of the layout is the same.
    #[getter]
    fn window(&self) -> Option<usize> {
        match self.group.as_ref()?.kind {
            GroupKind::Window { tokens, .. } | GroupKind::Chunk { tokens, .. } => Some(tokens),
            GroupKind::Full | GroupKind::State => None,
        }
    }

    fn __repr__(&self) -> String {
        let (pages, tokens, of) = (self.pages.len(), self.tokens.len(), of_group(self.group()));
        let (namespace, tier) = (&self.namespace, self.tier());
        format!("Stored({pages} pages, {tokens} tokens, namespace={namespace}, tier='{tier}'{of})")
    }
}

/// Pages were removed, or units of a group of an `ArenaPrefixCache`.
#[pyclass(frozen, module = "kvpool", name = "Removed")]
pub(super) struct Removed {
    pages: Vec<PageHash>,
    tier: Tier,
    group: Option<Arc<EventGroup>>,
}

#[pymethods]
impl Removed {
    /// The keys of the pages; of units, the keys of the pages that they ended with.
    #[getter]
    fn pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        keys(py, &self.pages)
    }

    /// The tier of the pages: "device" or "host".
    #[getter]
    const fn tier(&self) -> &'static str {
        self.tier.name()
    }

    /// The name of the group whose units were removed; `None` for pages, which are those of a `PrefixCache`, and those of an
    /// `ArenaPrefixCache` that has no full group with a unit for every page.
    #[getter]
    fn group(&self) -> Option<&str> {
        self.group.as_ref().map(|group| &group.name[..])
    }

    /// The kind of the group: "full", "window", "chunk" or "state"; `None` for pages.
    #[getter]
    fn kind(&self) -> Option<&'static str> {
        self.group.as_ref().map(|group| group.kind.name())
    }

    fn __repr__(&self) -> String {
        format!("Removed({} pages, tier='{}'{})", self.pages.len(), self.tier(), of_group(self.group()))
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

fn of_group(name: Option<&str>) -> String {
    name.map_or(String::new(), |name| format!(", group='{name}'"))
}

fn keys<'py>(py: Python<'py>, keys: &[PageHash]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, keys.iter().map(|key| PyBytes::new(py, key)))
}

/// Converts an event to a Python object.
pub(super) fn event_to_py(py: Python<'_>, event: CacheEvent) -> PyResult<Py<PyAny>> {
    Ok(match event {
        CacheEvent::Stored { pages, parent, tokens, namespace, tier, group } => {
            Py::new(py, Stored { pages, parent, tokens, namespace, tier, group })?.into_any()
        }
        CacheEvent::Removed { pages, tier, group } => Py::new(py, Removed { pages, tier, group })?.into_any(),
        CacheEvent::Cleared => Py::new(py, Cleared)?.into_any(),
    })
}
