//! Declarations of what a model keeps: planes, groups of layers, and the whole of a model.

use std::collections::HashSet;
use std::fmt::{self, Write as _};
use std::ops::Range;

use crate::base::{DType, Error, Result, bytes_of, try_to_vec};

/// One array of a layer: what an entry of it is.
///
/// ```
/// use kvpool::base::DType;
/// use kvpool::layout::Plane;
/// assert_eq!(Plane::new("k", DType::BF16, &[8, 128]).unwrap().entry_bytes(), 2048);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Plane {
    name: String,
    dtype: DType,
    /// The shape of one entry. Elements below a byte are declared by the bytes that they are packed in.
    shape: Vec<usize>,
    /// Product of the extents and the size of an element: computed once, as it cannot overflow.
    entry_bytes: usize,
}

impl Plane {
    /// A plane of entries of `shape`; an empty shape is a single element.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a name that is empty or has other characters
    /// than letters, digits and `_`, and for an entry of no bytes or of more than an address can name.
    pub fn new(name: &str, dtype: DType, shape: &[usize]) -> Result<Self> {
        check_name("a plane", name)?;
        let entry_bytes = bytes_of("an entry", shape, dtype)?;
        if entry_bytes == 0 {
            return Err(Error::config(format!("plane {name} of shape {shape:?} has no bytes")));
        }
        Ok(Self { name: name.to_owned(), dtype, shape: shape.to_vec(), entry_bytes })
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the shape of one entry.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the bytes of one entry.
    #[must_use]
    pub const fn entry_bytes(&self) -> usize {
        self.entry_bytes
    }
}

impl fmt::Display for Plane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{:?}", self.name, self.dtype, self.shape)
    }
}

/// How long the entries of a group are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// One entry for each token (or stride of tokens), as long as the request lives.
    Full,
    /// The last `tokens` tokens, and the first `sinks` of the request.
    Window {
        /// Tokens that a query attends to, itself included.
        tokens: usize,
        /// Tokens at the beginning that stay.
        sinks: usize,
    },
    /// The tokens since the last multiple of `tokens`, and the first `sinks` of the request.
    Chunk {
        /// Tokens of a chunk.
        tokens: usize,
        /// Tokens at the beginning that stay.
        sinks: usize,
    },
    /// One entry for each request, which every token changes.
    State,
}

impl GroupKind {
    /// Returns the name of the kind.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window { .. } => "window",
            Self::Chunk { .. } => "chunk",
            Self::State => "state",
        }
    }

    /// Returns how many tokens of a request of `tokens` tokens are needed for the next one, sinks apart.
    ///
    /// The next query of a window sees itself and the `tokens - 1` before it; that of a chunk sees the chunk it
    /// lies in, which has just begun at a multiple.
    const fn reach(self, tokens: usize) -> usize {
        match self {
            Self::Full => tokens,
            Self::Window { tokens: window, .. } => {
                let reach = window - 1;
                if tokens < reach { tokens } else { reach }
            }
            Self::Chunk { tokens: chunk, .. } => tokens % chunk,
            Self::State => 0,
        }
    }

    /// Returns the first token, sinks apart, that the next one after `tokens` tokens sees.
    #[must_use]
    pub const fn first_seen(self, tokens: usize) -> usize {
        tokens - self.reach(tokens)
    }

    /// Returns the tokens at the beginning that stay.
    #[must_use]
    pub const fn sinks(self) -> usize {
        match self {
            Self::Window { sinks, .. } | Self::Chunk { sinks, .. } => sinks,
            Self::Full | Self::State => 0,
        }
    }
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Full | Self::State => f.write_str(self.name()),
            Self::Window { tokens, sinks } | Self::Chunk { tokens, sinks } => {
                write!(f, "{}({tokens})", self.name())?;
                if sinks > 0 { write!(f, " + {sinks} sinks") } else { Ok(()) }
            }
        }
    }
}

/// The part of a group's bytes that a rank has.
///
/// Two ranks with the same part have the same bytes: one copy of them on a host is enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Share {
    /// The number of the part, below `parts`.
    pub part: usize,
    /// The number of parts; 1 if every rank has the same bytes.
    pub parts: usize,
}

impl Share {
    /// All of it, as with one rank, or with ranks that all have the same.
    pub const WHOLE: Self = Self { part: 0, parts: 1 };
}

/// The units of a prefix that a request needs to go on behind it: positions in units of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixUnits {
    /// Units of sinks at the beginning, before `units`.
    pub sinks: usize,
    /// The others.
    pub units: Range<usize>,
}

/// Layers whose entries live and die together, with one index space.
///
/// ```
/// use kvpool::base::DType;
/// use kvpool::layout::{Group, GroupKind, Plane, Share};
/// let planes = vec![
///     Plane::new("k", DType::BF16, &[8, 64]).unwrap(),
///     Plane::new("v", DType::BF16, &[8, 64]).unwrap(),
/// ];
/// let window = GroupKind::Window { tokens: 128, sinks: 0 };
/// let group = Group::new("window", window, &[0, 2, 4], planes).unwrap();
/// assert_eq!(group.unit_tokens(16), Some(16));
/// assert_eq!(group.unit_bytes(16).unwrap(), 3 * 16 * 2 * 1024);
/// assert_eq!(group.units_of(1000, 16), 9);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    name: String,
    kind: GroupKind,
    /// Layers with entries, ascending.
    layers: Vec<usize>,
    /// Layers that read the entries of another one: `(reader, layer)`, ascending.
    aliases: Vec<(usize, usize)>,
    /// The arrays of each layer.
    planes: Vec<Plane>,
    /// Tokens that an entry stands for; of no meaning to a state.
    stride: usize,
    share: Share,
    /// Bytes of an entry in one layer, of all planes.
    entry_bytes: usize,
}

impl Group {
    /// A group of `layers`, each with `planes`. An entry stands for one token, and the rank has all of it.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for an invalid or repeated name, no layer or no
    /// plane, layers that do not ascend, entries of more bytes than an address can name, and windows or chunks of no
    /// token.
    pub fn new(name: &str, kind: GroupKind, layers: &[usize], planes: Vec<Plane>) -> Result<Self> {
        check_name("a group", name)?;
        if layers.is_empty() || planes.is_empty() {
            let what = if layers.is_empty() { "layer" } else { "plane" };
            return Err(Error::config(format!("group {name} has no {what}")));
        }
        if let Some([before, layer]) = layers.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(Error::config(format!(
                "group {name} lists layer {layer} behind layer {before}; its layers must ascend"
            )));
        }
        let mut names = HashSet::new();
        if let Some(twice) = planes.iter().find(|plane| !names.insert(plane.name())) {
            return Err(Error::config(format!("group {name} has two planes {}", twice.name())));
        }
        if let GroupKind::Window { tokens: 0, .. } | GroupKind::Chunk { tokens: 0, .. } = kind {
            return Err(Error::config(format!("group {name} has a {} of 0 tokens", kind.name())));
        }
        let entry_bytes = planes.iter().try_fold(0usize, |sum, plane| sum.checked_add(plane.entry_bytes()));
        let entry_bytes = entry_bytes.filter(|bytes| i64::try_from(*bytes).is_ok()).ok_or_else(|| {
            Error::config(format!("an entry of group {name} has more bytes than an address can name"))
        })?;
        Ok(Self {
            name: name.to_owned(),
            kind,
            layers: try_to_vec(layers)?,
            aliases: Vec::new(),
            planes,
            stride: 1,
            share: Share::WHOLE,
            entry_bytes,
        })
    }

    /// Makes an entry stand for `stride` tokens.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a stride of 0, and for a state.
    pub fn with_stride(self, stride: usize) -> Result<Self> {
        if stride == 0 || (self.kind == GroupKind::State && stride > 1) {
            let Self { name, kind, .. } = &self;
            return Err(Error::config(format!(
                "group {name}, of kind {kind}, has entries for {stride} tokens"
            )));
        }
        Ok(Self { stride, ..self })
    }

    /// Makes layers read the entries of others: `(reader, layer)`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a layer that has no entries here, and for a
    /// reader that has some, or is named twice.
    pub fn with_aliases(self, aliases: &[(usize, usize)]) -> Result<Self> {
        let mut aliases = aliases.to_vec();
        aliases.sort_unstable();
        let Self { name, layers, .. } = &self;
        for (position, &(reader, layer)) in aliases.iter().enumerate() {
            if layers.binary_search(&layer).is_err() {
                return Err(Error::config(format!(
                    "layer {reader} reads the entries of layer {layer}, which has none in group {name}"
                )));
            }
            if layers.binary_search(&reader).is_ok() {
                return Err(Error::config(format!(
                    "layer {reader} has entries in group {name}, and cannot read those of layer {layer}"
                )));
            }
            if position > 0 && aliases[position - 1].0 == reader {
                return Err(Error::config(format!("layer {reader} is an alias twice in group {name}")));
            }
        }
        Ok(Self { aliases, ..self })
    }

    /// Makes this the part of a rank. Shapes of planes are those of the part.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a part that does not exist.
    pub fn with_share(self, share: Share) -> Result<Self> {
        if share.part >= share.parts {
            let Share { part, parts } = share;
            return Err(Error::config(format!("group {} has part {part} of {parts}", self.name)));
        }
        Ok(Self { share, ..self })
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns how long entries are needed.
    #[must_use]
    pub const fn kind(&self) -> GroupKind {
        self.kind
    }

    /// Returns the layers with entries, ascending.
    #[must_use]
    pub fn layers(&self) -> &[usize] {
        &self.layers
    }

    /// Returns the layers that read the entries of another one: `(reader, layer)`.
    #[must_use]
    pub fn aliases(&self) -> &[(usize, usize)] {
        &self.aliases
    }

    /// Returns the arrays of each layer.
    #[must_use]
    pub fn planes(&self) -> &[Plane] {
        &self.planes
    }

    /// Returns the number of tokens that an entry stands for.
    #[must_use]
    pub const fn stride(&self) -> usize {
        self.stride
    }

    /// Returns the part that a rank has.
    #[must_use]
    pub const fn share(&self) -> Share {
        self.share
    }

    /// Returns the place of a layer, or of the layer whose entries it reads, among [`Self::layers`].
    #[must_use]
    pub fn position(&self, layer: usize) -> Option<usize> {
        let alias = self.aliases.binary_search_by_key(&layer, |&(reader, _)| reader);
        let layer = alias.map_or(layer, |at| self.aliases[at].1);
        self.layers.binary_search(&layer).ok()
    }

    /// Returns the bytes of an entry in one layer, all planes together.
    #[must_use]
    pub const fn entry_bytes(&self) -> usize {
        self.entry_bytes
    }

    /// Returns the number of tokens of a unit where a page has `page_size`: at least one entry's; `None` for
    /// states, which are not of tokens.
    #[must_use]
    pub fn unit_tokens(&self, page_size: usize) -> Option<usize> {
        (self.kind != GroupKind::State).then(|| page_size.max(self.stride))
    }

    /// Returns the number of entries of a unit.
    #[must_use]
    pub fn unit_entries(&self, page_size: usize) -> usize {
        self.unit_tokens(page_size).map_or(1, |tokens| tokens / self.stride)
    }

    /// Returns the whole units of a prefix of `tokens` tokens that a request needs to go on behind it. `None` for
    /// states. Where `tokens` ends within an entry of several tokens, what is known of it is in a state.
    ///
    /// ```
    /// use kvpool::base::DType;
    /// use kvpool::layout::{Group, GroupKind, Plane, PrefixUnits};
    /// let k = vec![Plane::new("k", DType::BF16, &[8, 64]).unwrap()];
    /// let group = Group::new("window", GroupKind::Window { tokens: 33, sinks: 4 }, &[0], k).unwrap();
    /// assert_eq!(group.prefix_units(160, 16), Some(PrefixUnits { sinks: 1, units: 8..10 }));
    /// ```
    #[must_use]
    pub fn prefix_units(&self, tokens: usize, page_size: usize) -> Option<PrefixUnits> {
        let each = self.unit_tokens(page_size)?;
        let (begin, end) = ((tokens - self.kind.reach(tokens)) / each, tokens / each);
        Some(PrefixUnits { sinks: begin.min(self.kind.sinks().div_ceil(each)), units: begin..end })
    }

    /// Returns the bytes of a unit in all layers.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for more than an address can name.
    pub fn unit_bytes(&self, page_size: usize) -> Result<usize> {
        let shape = [self.layers.len(), self.unit_entries(page_size), self.entry_bytes()];
        bytes_of(&format!("a unit of group {}", self.name), &shape, DType::U8)
    }

    /// Returns the units that a request of `tokens` tokens holds between two steps.
    ///
    /// A window or chunk needs the pages with the tokens that the next query sees, and the pages of its sinks.
    #[must_use]
    pub fn units_of(&self, tokens: usize, page_size: usize) -> usize {
        let Some(each) = self.unit_tokens(page_size) else { return 1 };
        let (end, begin) = (tokens.div_ceil(each), self.kind.first_seen(tokens) / each);
        begin.min(self.kind.sinks().div_ceil(each)) + (end - begin)
    }

    /// Returns everything that the bytes of a unit depend on, in one line.
    #[must_use]
    pub fn description(&self) -> String {
        let Self { name, kind, layers, planes, stride, share: Share { part, parts }, .. } = self;
        let mut text = format!("{name}: {kind}, stride {stride}, part {part} of {parts}, layers {layers:?}");
        for (reader, layer) in &self.aliases {
            // Writing to a string does not fail.
            let _ = write!(text, ", {reader} as {layer}");
        }
        for plane in planes {
            let _ = write!(text, "; {plane}");
        }
        text
    }
}

/// What a model keeps for its requests: groups of layers, and the tokens of a page.
///
/// ```
/// use kvpool::base::DType;
/// use kvpool::layout::{CacheLayout, Group, GroupKind, Plane};
/// let kv = |dim| vec![
///     Plane::new("k", DType::BF16, &[2, dim]).unwrap(),
///     Plane::new("v", DType::BF16, &[2, dim]).unwrap(),
/// ];
/// let state = vec![Plane::new("recurrent", DType::F32, &[4, 64, 64]).unwrap()];
/// let layout = CacheLayout::new("a hybrid model", 16, vec![
///     Group::new("full", GroupKind::Full, &[3], kv(128)).unwrap(),
///     Group::new("state", GroupKind::State, &[0, 1, 2], state).unwrap(),
/// ]).unwrap();
/// assert_eq!(layout.request_bytes(100), 7 * 16 * 1024 + 3 * 65536);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CacheLayout {
    model: String,
    page_size: usize,
    groups: Vec<Group>,
}

impl CacheLayout {
    /// Declares the groups of a model, with pages of `page_size` tokens.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for no groups, groups of one name, pages of no
    /// token, a stride that is neither a divisor nor a multiple of the page, and units of more bytes than an
    /// address can name.
    pub fn new(model: &str, page_size: usize, groups: Vec<Group>) -> Result<Self> {
        if groups.is_empty() {
            return Err(Error::config(format!("the layout of {model:?} has no group")));
        }
        if page_size == 0 {
            return Err(Error::config("page_size is 0; it must be at least 1"));
        }
        let mut names = HashSet::new();
        for group in &groups {
            let (name, stride) = (group.name(), group.stride());
            if !names.insert(name) {
                return Err(Error::config(format!("two groups are called {name}")));
            }
            if !page_size.is_multiple_of(stride) && !stride.is_multiple_of(page_size) {
                return Err(Error::config(format!(
                    "group {name} has one entry for {stride} tokens, which does not fit pages of {page_size}"
                )));
            }
            group.unit_bytes(page_size)?;
        }
        Ok(Self { model: model.to_owned(), page_size, groups })
    }

    /// Returns the name of the model, which the bytes depend on.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Returns the tokens of a page.
    #[must_use]
    pub const fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns the groups.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Returns the number of the group called `name`.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) if there is none.
    pub fn group_number(&self, name: &str) -> Result<usize> {
        self.groups.iter().position(|group| group.name() == name).ok_or_else(|| {
            let names: Vec<_> = self.groups.iter().map(Group::name).collect();
            Error::argument(format!("there is no group {name:?}; the groups are {}", names.join(", ")))
        })
    }

    /// Returns the bytes that a request of `tokens` tokens holds, in whole units of every group.
    #[must_use]
    pub fn request_bytes(&self, tokens: usize) -> usize {
        let bytes = |group: &Group| {
            let unit = group.layers.len() * group.unit_entries(self.page_size) * group.entry_bytes();
            unit.saturating_mul(group.units_of(tokens, self.page_size))
        };
        self.groups.iter().map(bytes).fold(0, usize::saturating_add)
    }

    /// Returns everything that the bytes of a pool depend on, a line each.
    #[must_use]
    pub fn descriptions(&self) -> Vec<String> {
        let first = [format!("model {:?}", self.model), format!("page_size {}", self.page_size)];
        first.into_iter().chain(self.groups.iter().map(Group::description)).collect()
    }

    /// Returns a digest of [`Self::descriptions`]. Layouts with the same have bytes that can be exchanged, if the model's
    /// name tells it from others of its shape.
    #[must_use]
    pub fn fingerprint(&self, digest: fn(&[&[u8]]) -> [u8; 32]) -> [u8; 32] {
        let text = self.descriptions().join("\n");
        digest(&[b"kvpool layout 1\n", text.as_bytes()])
    }

    /// Returns the first difference to another layout, or `None` if they have the same fingerprint.
    ///
    /// ```
    /// # use kvpool::base::DType;
    /// # use kvpool::layout::{CacheLayout, Group, GroupKind, Plane};
    /// let of = |dim| {
    ///     let k = vec![Plane::new("k", DType::BF16, &[8, dim]).unwrap()];
    ///     CacheLayout::new("m", 16, vec![Group::new("full", GroupKind::Full, &[0], k).unwrap()]).unwrap()
    /// };
    /// let difference = of(64).difference(&of(128)).unwrap();
    /// assert_eq!(difference, "group full: plane k is bfloat16[8, 64] here and bfloat16[8, 128] there");
    /// ```
    #[must_use]
    pub fn difference(&self, other: &Self) -> Option<String> {
        let apart = |what: &str, here: String, there: String| {
            (here != there).then(|| format!("{what} is {here} here and {there} there"))
        };
        let names = |layout: &Self| {
            layout.groups.iter().map(|group| group.name.clone()).collect::<Vec<_>>().join(", ")
        };
        apart("the model", format!("{:?}", self.model), format!("{:?}", other.model))
            .or_else(|| apart("page_size", self.page_size.to_string(), other.page_size.to_string()))
            .or_else(|| apart("the list of groups", names(self), names(other)))
            .or_else(|| {
                let pairs = self.groups.iter().zip(&other.groups);
                pairs.into_iter().find_map(|(here, there)| here.difference(there))
            })
    }
}

impl Group {
    /// Returns the first difference to a group of the same name.
    fn difference(&self, other: &Self) -> Option<String> {
        let part = |group: &Self| format!("{} of {}", group.share.part, group.share.parts);
        let planes = |group: &Self| {
            let names: Vec<_> = group.planes.iter().map(Plane::name).collect();
            names.join(", ")
        };
        let facts = [
            ("the kind", self.kind.to_string(), other.kind.to_string()),
            ("the stride", self.stride.to_string(), other.stride.to_string()),
            ("the part", part(self), part(other)),
            ("the list of layers", format!("{:?}", self.layers), format!("{:?}", other.layers)),
            ("the list of aliases", format!("{:?}", self.aliases), format!("{:?}", other.aliases)),
            ("the list of planes", planes(self), planes(other)),
        ];
        let text = |plane: &Plane| format!("{}{:?}", plane.dtype, plane.shape);
        let arrays = self.planes.iter().zip(&other.planes);
        let arrays = arrays.map(|(here, there)| (format!("plane {}", here.name), text(here), text(there)));
        let facts = facts.into_iter().map(|(what, here, there)| (what.to_owned(), here, there));
        let mut differing = facts.chain(arrays).filter(|(_, here, there)| here != there);
        let (what, here, there) = differing.next()?;
        Some(format!("group {}: {what} is {here} here and {there} there", self.name))
    }
}

/// Checks a name: it is part of messages, of arguments and of what is digested.
fn check_name(what: &str, name: &str) -> Result<()> {
    if !name.is_empty() && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_') {
        return Ok(());
    }
    Err(Error::config(format!("the name of {what} is {name:?}; it must be of letters, digits and _")))
}
