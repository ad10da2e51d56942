//! Where the units of planes lie within memory.

use std::ops::Range;

use crate::base::{DType, Error, Result, bytes_of};

use super::cache_layout::{Group, Plane};

/// Where the units of one plane lie, in every layer: `unit_step` bytes apart within a layer, layers `layer_step`
/// bytes apart.
///
/// Every address of a unit, in a pool, an arena or a piece of host memory, is computed here.
///
/// ```
/// use kvpool::layout::PlaneRuns;
/// let rows = PlaneRuns { offset: 512, layers: 2, layer_step: 4096, units: 64, unit_step: 32, unit_bytes: 32 };
/// assert_eq!(rows.at(1, 3), 512 + 4096 + 3 * 32);
/// assert_eq!(rows.end(), 512 + 4096 + 64 * 32);
/// assert_eq!(rows.in_pages(16).unit(0, 2), 512 + 32 * 32..512 + 48 * 32);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneRuns {
    /// Byte of the first layer's unit 0.
    pub offset: usize,
    /// The number of layers.
    pub layers: usize,
    /// Bytes from a unit in one layer to the same in the next; 0 if layers share one space of units.
    pub layer_step: usize,
    /// The number of units, those that nobody is given included.
    pub units: usize,
    /// Bytes from one unit to the next in a layer.
    pub unit_step: usize,
    /// Bytes of a unit in one layer.
    pub unit_bytes: usize,
}

impl PlaneRuns {
    /// Returns the first byte of a unit in a layer. It may be beyond those that exist.
    #[inline]
    #[must_use]
    pub const fn at(&self, layer: usize, unit: usize) -> usize {
        self.offset + layer * self.layer_step + unit * self.unit_step
    }

    /// Returns the bytes of a unit in a layer.
    #[must_use]
    pub const fn unit(&self, layer: usize, unit: usize) -> Range<usize> {
        let begin = self.at(layer, unit);
        begin..begin + self.unit_bytes
    }

    /// Returns the runs of one layer.
    #[must_use]
    pub const fn layer(&self, layer: usize) -> Self {
        Self { offset: self.at(layer, 0), layers: 1, ..*self }
    }

    /// Returns the runs of some layers.
    #[must_use]
    pub const fn of_layers(&self, layers: &Range<usize>) -> Self {
        Self { offset: self.at(layers.start, 0), layers: layers.end - layers.start, ..*self }
    }

    /// Returns the same bytes, with `page_size` units, one behind the other, as one. What is behind the last whole
    /// page belongs to none.
    #[must_use]
    pub const fn in_pages(&self, page_size: usize) -> Self {
        let (unit_step, unit_bytes) = (page_size * self.unit_step, page_size * self.unit_bytes);
        Self { units: self.units / page_size, unit_step, unit_bytes, ..*self }
    }

    /// Returns the bytes of the units of a layer, of all layers.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.layers * self.units * self.unit_bytes
    }

    /// Returns the byte behind the last unit of the last layer; the offset, if there is no unit.
    #[must_use]
    pub const fn end(&self) -> usize {
        match (self.layers.checked_sub(1), self.units.checked_sub(1)) {
            (Some(layer), Some(unit)) => self.at(layer, unit) + self.unit_bytes,
            _ => self.offset,
        }
    }
}

/// The order of planes and layers of a [`GroupPlacement`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneOrder {
    /// All layers of the first plane, then those of the next.
    PlaneByPlane {
        /// What the first byte of a plane is a multiple of.
        plane: usize,
        /// What the first byte of each layer is a multiple of, counted from its plane; divides `plane`.
        layer: usize,
    },
    /// All planes of the first layer, then those of the next. Planes begin a whole number of pages behind the one
    /// before, for kernels that reach all from one address; their entries have equal bytes.
    LayerByLayer {
        /// Units of a page.
        page_size: usize,
        /// What the first byte of each run is a multiple of; a power of two.
        alignment: usize,
    },
}

/// The planes of a group, one entry a unit, in memory that nothing else lies in.
///
/// ```
/// use kvpool::base::DType;
/// use kvpool::layout::{Group, GroupKind, GroupPlacement, Plane, PlaneOrder};
/// let plane = |name| Plane::new(name, DType::F16, &[2, 4]).unwrap();
/// let group = Group::new("full", GroupKind::Full, &[0, 1], vec![plane("k"), plane("v")]).unwrap();
/// let order = PlaneOrder::PlaneByPlane { plane: 256, layer: 256 };
/// let placement = GroupPlacement::new(&group, 20, order).unwrap();
/// let [k, v] = placement.planes() else { unreachable!() };
/// assert_eq!((k.at(1, 0), v.at(0, 3), placement.end()), (512, 1024 + 3 * 16, 2048));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupPlacement {
    planes: Vec<PlaneRuns>,
    end: usize,
}

impl GroupPlacement {
    /// Places `units` entries of every plane and layer of `group`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for sizes whose bytes overflow, and for planes of
    /// different bytes where they must be equal.
    pub fn new(group: &Group, units: usize, order: PlaneOrder) -> Result<Self> {
        let (planes, layers) = (group.planes(), group.layers().len());
        let alignments = match order {
            PlaneOrder::PlaneByPlane { plane, layer } => [plane, layer],
            PlaneOrder::LayerByLayer { alignment, page_size } => [alignment, page_size],
        };
        if alignments.contains(&0) {
            return Err(Error::config(format!("{order:?} has a multiple of 0")));
        }
        match order {
            PlaneOrder::PlaneByPlane { plane, layer } => {
                Self::plane_by_plane(planes, layers, units, plane, layer)
            }
            PlaneOrder::LayerByLayer { page_size, alignment } => {
                Self::layer_by_layer(planes, layers, units, page_size, alignment)
            }
        }
    }

    fn plane_by_plane(
        planes: &[Plane],
        layers: usize,
        units: usize,
        plane_alignment: usize,
        layer_alignment: usize,
    ) -> Result<Self> {
        let (mut placed, mut end) = (Vec::with_capacity(planes.len()), 0);
        for plane in planes {
            let unit_bytes = plane.entry_bytes();
            let run = bytes_of("one buffer", &[units, unit_bytes], DType::U8)?;
            let layer_step =
                bytes_of("one buffer", &[run.div_ceil(layer_alignment), layer_alignment], DType::U8)?;
            let offset =
                bytes_of("all layers", &[usize::div_ceil(end, plane_alignment), plane_alignment], DType::U8)?;
            placed.push(PlaneRuns { offset, layers, layer_step, units, unit_step: unit_bytes, unit_bytes });
            end = checked_sum(offset, bytes_of("all layers", &[layers, layer_step], DType::U8)?)?;
        }
        Ok(Self { planes: placed, end })
    }

    fn layer_by_layer(
        planes: &[Plane],
        layers: usize,
        units: usize,
        page_size: usize,
        alignment: usize,
    ) -> Result<Self> {
        let unit_bytes = planes[0].entry_bytes();
        if let Some(other) = planes.iter().find(|plane| plane.entry_bytes() != unit_bytes) {
            return Err(Error::config(format!(
                "planes that lie layer by layer have entries of equal bytes, not {unit_bytes} ({}) and {} ({})",
                planes[0].name(),
                other.entry_bytes(),
                other.name()
            )));
        }
        let run = bytes_of("one buffer", &[units, unit_bytes], DType::U8)?;
        let page = bytes_of("one page", &[page_size, unit_bytes], DType::U8)?;
        // The smallest number of whole pages that is aligned.
        let times = alignment >> page.trailing_zeros().min(alignment.trailing_zeros());
        let whole = bytes_of("aligned pages", &[page, times], DType::U8)?.max(1);
        let step = bytes_of("one buffer", &[run.div_ceil(whole), whole], DType::U8)?;
        let layer_step = bytes_of("one layer", &[planes.len(), step], DType::U8)?;
        let end = bytes_of("all layers", &[layer_step, layers], DType::U8)?;
        let place =
            |offset| PlaneRuns { offset, layers, layer_step, units, unit_step: unit_bytes, unit_bytes };
        Ok(Self { planes: (0..planes.len()).map(|plane| place(plane * step)).collect(), end })
    }

    /// Returns the runs of each plane.
    #[must_use]
    pub fn planes(&self) -> &[PlaneRuns] {
        &self.planes
    }

    /// Returns the bytes of all, up to the alignment of the last run.
    #[must_use]
    pub const fn end(&self) -> usize {
        self.end
    }
}

fn checked_sum(one: usize, other: usize) -> Result<usize> {
    one.checked_add(other)
        .filter(|sum| isize::try_from(*sum).is_ok())
        .ok_or_else(|| Error::config(format!("{one} and {other} bytes are more than an address can name")))
}
