//! `kvpool.CacheLayout`, `kvpool.Group` and `kvpool.Plane`: what a model keeps for its requests.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::base::Error;
use crate::layout::{
    CacheLayout as Layout, Group as Layers, GroupKind, Plane as Array, Share, SlabLayout as Slabs,
    SlabOptions,
};

use super::args::{self, Arg};
use super::framework::to_dtype;
use super::page_keys::digest;

/// One array of a layer.
///
/// Args:
///     name: A name of letters, digits and `_`: "k", "v", "latent", "k_scale", "index_k", "recurrent", "conv".
///     dtype: Storage dtype of the elements. Elements below a byte are declared by the bytes they are packed in.
///     shape: Shape of one entry.
///
/// Raises:
///     ConfigError: If the name is invalid, or an entry has no bytes.
///     TypeError: If `dtype` is not a storage dtype.
#[pyclass(frozen, eq, hash, module = "kvpool", name = "Plane")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Plane(Array);

#[pymethods]
impl Plane {
    #[new]
    fn new(name: &str, dtype: &Bound<'_, PyAny>, shape: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self(Array::new(name, args::storage_dtype(dtype)?, &args::extents("shape", shape)?)?))
    }

    /// The name.
    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    /// Dtype of the elements: a `torch.dtype`, or its name if PyTorch is not installed.
    #[getter]
    fn dtype(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_dtype(py, self.0.dtype())
    }

    /// Shape of one entry.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.shape())
    }

    /// Bytes of one entry.
    #[getter]
    fn entry_bytes(&self) -> usize {
        self.0.entry_bytes()
    }

    fn __getnewargs__(&self) -> (&str, &'static str, Vec<usize>) {
        (self.0.name(), self.0.dtype().name(), self.0.shape().to_vec())
    }

    fn __repr__(&self) -> String {
        format!("Plane('{}', '{}', {:?})", self.0.name(), self.0.dtype(), self.0.shape())
    }
}

/// Layers whose entries live and die together, with one index space.
///
/// Args:
///     name: A name of letters, digits and `_`.
///     kind: "full": an entry for each token, as long as the request lives. "window": the last `tokens` tokens, the
///         query's own included. "chunk": the tokens since the last multiple of `tokens`. "state": one entry for each
///         request.
///     layers: Layers that have entries, ascending.
///     planes: The arrays of each layer, of different names.
///     tokens: Tokens of a window or chunk.
///     sinks: Tokens at the beginning that stay, whatever the window or chunk.
///     stride: Tokens that an entry stands for: 4 or 128 in compressed chains.
///     aliases: Layers that read the entries of another: {reader: layer}.
///     share: `(part, parts)`: the part of the bytes that this rank has. Ranks with the same part have the same bytes;
///         `(0, 1)` if all have all of it. Shapes of planes are those of the part.
///
/// Raises:
///     ConfigError: If an argument is invalid; the message has the numbers.
#[pyclass(frozen, eq, hash, module = "kvpool", name = "Group")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Group(Layers);

/// The names of kinds.
const KINDS: [&str; 4] = ["full", "window", "chunk", "state"];

/// Returns the kind called `name`.
fn kind_of(name: &str, tokens: Option<usize>, sinks: usize) -> crate::base::Result<GroupKind> {
    match (name, tokens) {
        ("full", None) if sinks == 0 => Ok(GroupKind::Full),
        ("state", None) if sinks == 0 => Ok(GroupKind::State),
        ("window", Some(tokens)) => Ok(GroupKind::Window { tokens, sinks }),
        ("chunk", Some(tokens)) => Ok(GroupKind::Chunk { tokens, sinks }),
        ("window" | "chunk", None) => Err(Error::config(format!("a {name} needs tokens"))),
        ("full" | "state", _) => Err(Error::config(format!("kind \"{name}\" has neither tokens nor sinks"))),
        _ => Err(Error::config(format!("kind {name:?} is none of {KINDS:?}"))),
    }
}

#[pymethods]
impl Group {
    #[new]
    #[pyo3(signature = (name, kind, layers, planes, *, tokens=None, sinks=Arg::Missing, stride=Arg::Missing, aliases=None,
                        share=None),
           text_signature = "(name, kind, layers, planes, *, tokens=None, sinks=0, stride=1, aliases=None, \
                             share=(0, 1))")]
    #[expect(clippy::too_many_arguments, reason = "all are facts of a group, most of them keywords")]
    fn new(
        name: &str,
        kind: &str,
        layers: &Bound<'_, PyAny>,
        planes: Vec<PyRef<'_, Plane>>,
        tokens: Option<&Bound<'_, PyAny>>,
        sinks: Arg<'_>,
        stride: Arg<'_>,
        aliases: Option<&Bound<'_, PyDict>>,
        share: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
    ) -> PyResult<Self> {
        let tokens = tokens.map(|tokens| args::size("tokens", tokens)).transpose()?;
        let kind = kind_of(kind, tokens, sinks.size("sinks", 0)?)?;
        let layer = |layer: Bound<'_, PyAny>| args::size("a layer", &layer);
        let layers = layers.try_iter()?.map(|found| layer(found?)).collect::<PyResult<Vec<_>>>()?;
        let planes = planes.iter().map(|plane| plane.0.clone()).collect();
        let mut group = Layers::new(name, kind, &layers, planes)?.with_stride(stride.size("stride", 1)?)?;
        if let Some(aliases) = aliases {
            let pair = |(reader, of)| Ok((layer(reader)?, layer(of)?));
            group = group.with_aliases(&aliases.iter().map(pair).collect::<PyResult<Vec<_>>>()?)?;
        }
        if let Some((part, parts)) = share {
            let (part, parts) = (args::size("a part", &part)?, args::size("parts", &parts)?);
            group = group.with_share(Share { part, parts })?;
        }
        Ok(Self(group))
    }

    /// The name.
    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    /// How long entries are needed: "full", "window", "chunk" or "state".
    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind().name()
    }

    /// Tokens of a window or chunk; None for other kinds.
    #[getter]
    fn tokens(&self) -> Option<usize> {
        match self.0.kind() {
            GroupKind::Window { tokens, .. } | GroupKind::Chunk { tokens, .. } => Some(tokens),
            GroupKind::Full | GroupKind::State => None,
        }
    }

    /// Tokens at the beginning that stay.
    #[getter]
    fn sinks(&self) -> usize {
        self.0.kind().sinks()
    }

    /// Layers that have entries, ascending.
    #[getter]
    fn layers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.layers())
    }

    /// The arrays of each layer.
    #[getter]
    fn planes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.planes().iter().map(|plane| Plane(plane.clone())))
    }

    /// Tokens that an entry stands for.
    #[getter]
    fn stride(&self) -> usize {
        self.0.stride()
    }

    /// Layers that read the entries of another: {reader: layer}.
    #[getter]
    fn aliases<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let aliases = PyDict::new(py);
        for (reader, layer) in self.0.aliases() {
            aliases.set_item(reader, layer)?;
        }
        Ok(aliases)
    }

    /// `(part, parts)`: the part of the bytes that this rank has.
    #[getter]
    fn share(&self) -> (usize, usize) {
        (self.0.share().part, self.0.share().parts)
    }

    /// Bytes of an entry in one layer.
    #[getter]
    fn entry_bytes(&self) -> usize {
        self.0.entry_bytes()
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let positional = (self.name(), self.kind(), self.layers(py)?, self.planes(py)?).into_pyobject(py)?;
        let keywords = PyDict::new(py);
        keywords.set_item("tokens", self.tokens())?;
        keywords.set_item("sinks", self.sinks())?;
        keywords.set_item("stride", self.stride())?;
        keywords.set_item("aliases", self.aliases(py)?)?;
        keywords.set_item("share", self.share())?;
        Ok((positional, keywords))
    }

    fn __repr__(&self) -> String {
        format!("<kvpool.Group {}>", self.0.description())
    }
}

/// What a model keeps for its requests. It has no memory and no device.
///
/// `str` gives a table. Layouts can be compared, hashed and pickled.
///
/// Args:
///     groups: The groups, of different names.
///     page_size: Tokens of a page. A group's stride is a divisor or a multiple of it.
///     model: Name of the model, which the bytes depend on.
///
/// Raises:
///     ConfigError: If an argument is invalid, or a page has more bytes than an address can name.
#[pyclass(frozen, eq, hash, module = "kvpool", name = "CacheLayout")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct CacheLayout(Layout);

impl CacheLayout {
    pub(super) const fn new_of(layout: Layout) -> Self {
        Self(layout)
    }

    pub(super) const fn layout(&self) -> &Layout {
        &self.0
    }
}

#[pymethods]
impl CacheLayout {
    #[new]
    #[pyo3(signature = (groups, *, page_size=Arg::Missing, model=""),
           text_signature = "(groups, *, page_size=16, model=\"\")")]
    fn new(groups: Vec<PyRef<'_, Group>>, page_size: Arg<'_>, model: &str) -> PyResult<Self> {
        let groups = groups.iter().map(|group| group.0.clone()).collect();
        Ok(Self(Layout::new(model, page_size.size("page_size", 16)?, groups)?))
    }

    /// Name of the model.
    #[getter]
    fn model(&self) -> &str {
        self.0.model()
    }

    /// Tokens of a page.
    #[getter]
    fn page_size(&self) -> usize {
        self.0.page_size()
    }

    /// The groups.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.groups().iter().map(|group| Group(group.clone())))
    }

    /// Digest of all of the layout, as 64 hexadecimal digits: BLAKE3. Pools, tiers and peers with the same can exchange
    /// bytes, if `model` tells the model from others of its shape.
    #[getter]
    fn fingerprint(&self) -> String {
        blake3::Hash::from(self.0.fingerprint(digest)).to_string()
    }

    /// Returns the first difference to another layout, in words, or None if the fingerprints are equal.
    fn difference(&self, other: &Self) -> Option<String> {
        self.0.difference(&other.0)
    }

    /// Returns the bytes that a request of `tokens` tokens needs between two steps, in whole units of each group.
    ///
    /// A window or chunk needs the pages that the next query sees, and those of its sinks.
    fn request_bytes(&self, tokens: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.0.request_bytes(args::size("tokens", tokens)?))
    }

    /// Returns the units of each group, by name, that a request of `tokens` tokens needs between two steps.
    fn request_units<'py>(&self, py: Python<'py>, tokens: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyDict>> {
        let (tokens, units) = (args::size("tokens", tokens)?, PyDict::new(py));
        for group in self.0.groups() {
            units.set_item(group.name(), group.units_of(tokens, self.0.page_size()))?;
        }
        Ok(units)
    }

    /// Returns how the groups lie in the slabs of an arena.
    ///
    /// Args:
    ///     arena_bytes: Bytes of the arena.
    ///     granularity: What the bytes of a slab are a multiple of.
    ///
    /// Raises:
    ///     ConfigError: If the arena has no room for a unit of every group at once, and a slab of padding.
    #[pyo3(signature = (arena_bytes, *, granularity=Arg::Missing),
           text_signature = "($self, arena_bytes, *, granularity=1)")]
    fn slabs(
        &self,
        py: Python<'_>,
        arena_bytes: &Bound<'_, PyAny>,
        granularity: Arg<'_>,
    ) -> PyResult<SlabLayout> {
        let arena_bytes = args::size("arena_bytes", arena_bytes)?;
        let options =
            SlabOptions { granularity: granularity.size("granularity", 1)?, ..SlabOptions::default() };
        let slabs = py.detach(|| Slabs::choose(&self.0, arena_bytes, options))?;
        Ok(SlabLayout { layout: self.0.clone(), slabs })
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let keywords = PyDict::new(py);
        keywords.set_item("page_size", self.page_size())?;
        keywords.set_item("model", self.model())?;
        Ok((PyTuple::new(py, [self.groups(py)?])?, keywords))
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        let groups: Vec<_> = self.0.groups().iter().map(Layers::name).collect();
        format!(
            "<kvpool.CacheLayout {:?}: {}; pages of {}>",
            self.0.model(),
            groups.join(", "),
            self.0.page_size()
        )
    }
}

/// How the groups of a layout lie in the slabs of an arena: of `CacheLayout.slabs` and `CacheArena.slabs`.
#[pyclass(frozen, module = "kvpool", name = "SlabLayout")]
pub(super) struct SlabLayout {
    layout: Layout,
    slabs: Slabs,
}

impl SlabLayout {
    pub(super) const fn of(layout: Layout, slabs: Slabs) -> Self {
        Self { layout, slabs }
    }

    /// Returns the number of a group.
    fn number(&self, group: &str) -> PyResult<usize> {
        Ok(self.layout.group_number(group)?)
    }
}

#[pymethods]
impl SlabLayout {
    /// Bytes of a slab.
    #[getter]
    fn slab_bytes(&self) -> usize {
        self.slabs.slab_bytes()
    }

    /// Number of slabs, the padding slab included.
    #[getter]
    fn num_slabs(&self) -> usize {
        self.slabs.slabs()
    }

    /// Bytes of all slabs.
    #[getter]
    fn mem_bytes(&self) -> usize {
        self.slabs.bytes()
    }

    /// The share of the arena that the group worst off loses to packing, were all of it its own: the ends of slabs,
    /// padding of units, and the end of the arena. The padding slab is not counted.
    #[getter]
    fn lost(&self) -> f64 {
        self.slabs.lost()
    }

    /// Returns the units of a slab of a group; of single layers, if it is placed layer by layer.
    ///
    /// Raises:
    ///     ArgumentError: If there is no such group.
    fn units(&self, group: &str) -> PyResult<usize> {
        Ok(self.slabs.groups()[self.number(group)?].units)
    }

    /// Returns the bytes from one unit of a group to the next, in a plane of a layer.
    ///
    /// Raises:
    ///     ArgumentError: If there is no such group.
    fn unit_step(&self, group: &str) -> PyResult<usize> {
        Ok(self.slabs.groups()[self.number(group)?].unit_step)
    }

    /// Returns whether each layer of a state has a unit of its own.
    ///
    /// Raises:
    ///     ArgumentError: If there is no such group.
    fn by_layer(&self, group: &str) -> PyResult<bool> {
        Ok(self.slabs.groups()[self.number(group)?].by_layer)
    }

    /// Returns the bytes of the arena that a unit of a group takes in all layers, its share of what a slab loses
    /// included.
    ///
    /// Raises:
    ///     ArgumentError: If there is no such group.
    fn held_bytes(&self, group: &str) -> PyResult<f64> {
        Ok(self.slabs.held_bytes(&self.layout, self.number(group)?))
    }

    fn __repr__(&self) -> String {
        let (count, bytes, lost) = (self.slabs.slabs(), self.slabs.slab_bytes(), 100.0 * self.slabs.lost());
        format!("<kvpool.SlabLayout: {count} slabs of {bytes} bytes, {lost:.2} % lost>")
    }
}
