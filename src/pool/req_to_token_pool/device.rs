//! Writes to a table on a GPU, with updates of the host's mirror.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use crate::base::bounded::signed;
use crate::base::{Id, IndexVec, RequestRow, Result, out_of_memory_error, try_collect};
use crate::kernels::{Executor, IndexSpace, IndexSpaces, Indices, Numbers};
use crate::memory::{BorrowedTensor, Stream};
use crate::pool::mirror::known_values;

use super::TableIndex;
use super::table::{RequestTable, as_many, broadcast, mismatched_error};

/// An operand of a launch.
enum Operand<'a> {
    List(Cow<'a, [i32]>),
    Tensor(BorrowedTensor<'a>),
    Same(i64),
    From(usize),
}

impl<'a> Operand<'a> {
    /// Creates an operand of indices. Indices in host memory are checked.
    fn new(indices: &Indices<'a>, space: IndexSpace) -> Result<Self> {
        match indices {
            Indices::Host(_) => indices.list(space).map(|list| Self::List(list.into())),
            Indices::Device { tensor, .. } => Ok(Self::Tensor(*tensor)),
        }
    }

    fn numbers(&self) -> Numbers<'_> {
        match self {
            Self::List(list) => Numbers::List(list),
            Self::Tensor(tensor) => Numbers::Tensor(tensor),
            Self::Same(number) => Numbers::Constant(*number),
            Self::From(first) => Numbers::Arange(signed(*first)),
        }
    }
}

/// Places of the table, checked as far as the host knows them.
struct TablePlaces<'a> {
    row: Operand<'a>,
    column: Operand<'a>,
    count: usize,
    /// The places, if the host knows them.
    known: Option<KnownPlaces>,
}

/// Places that the host knows.
enum KnownPlaces {
    /// Row and column of each.
    Points(Vec<(RequestRow, u32)>),
    /// `count` columns of one row, starting at `from`.
    Columns { row: RequestRow, from: usize, count: usize },
}

impl KnownPlaces {
    fn rows(&self) -> Vec<RequestRow> {
        match self {
            Self::Points(points) => points.iter().map(|(row, _)| *row).collect(),
            Self::Columns { row, .. } => vec![*row],
        }
    }
}

impl RequestTable {
    /// Works like [`Self::write`] in one launch.
    pub(super) fn write_on_device(
        &mut self,
        index: &TableIndex<'_>,
        values: &Indices<'_>,
        stream: Stream,
    ) -> Result<()> {
        self.check_not_capturing(stream)?;
        let _values = self.executor.use_indices([values], stream)?;
        let known = known(values)?.map(IndexVec::into_i32).transpose()?;
        let (places, _uses) = match index {
            TableIndex::Columns { row, start, end } => {
                let (row, from, stop) = self.checked_columns(*row, *start, *end)?;
                let count = stop - from;
                let known = Some(KnownPlaces::Columns { row, from, count });
                let (row, column) = (Operand::Same(row.into()), Operand::From(from));
                (TablePlaces { row, column, count, known }, None)
            }
            TableIndex::Points { rows, columns } => {
                let uses = self.executor.use_indices([rows, columns], stream)?;
                as_many(rows.len(), columns.len())?;
                (self.places(rows, columns)?, uses)
            }
        };
        let value = match (values, values.len(), known.as_deref()) {
            (_, len, _) if len != places.count && len != 1 => {
                return Err(mismatched_error(len, places.count));
            }
            (Indices::Host(_), _, Some(&[only])) => Operand::Same(only.into()),
            (Indices::Host(_), _, known) => Operand::List(known.unwrap_or_default().into()),
            (Indices::Device { tensor, .. }, 1, _) => {
                Operand::Tensor(tensor.expanded(places.count).unwrap_or(*tensor))
            }
            (Indices::Device { tensor, .. }, ..) => Operand::Tensor(*tensor),
        };
        match (&places.known, known.as_deref()) {
            (Some(KnownPlaces::Points(points)), Some(values)) if has_repeats(points)? => {
                self.enqueue_last(points, values, stream)
            }
            (_, known) => self.enqueue(&places, &value, known, stream),
        }
    }

    /// Returns the places of points.
    fn places<'a>(&self, rows: &Indices<'a>, columns: &Indices<'a>) -> Result<TablePlaces<'a>> {
        let IndexSpaces { rows: row_space, columns: column_space } = self.spaces();
        let (row, column) = (Operand::new(rows, row_space)?, Operand::new(columns, column_space)?);
        let known = match known(rows)?.zip(known(columns)?) {
            None => None,
            Some((rows, columns)) => {
                let points = rows.ids(row_space.len)?.into_iter().zip(column_space.check(&columns)?);
                Some(KnownPlaces::Points(try_collect(points)?))
            }
        };
        Ok(TablePlaces { row, column, count: rows.len(), known })
    }

    /// Enqueues a write to places with repeats: the last value of each.
    fn enqueue_last(&mut self, points: &[(RequestRow, u32)], values: &[i32], stream: Stream) -> Result<()> {
        let mut last: HashMap<(RequestRow, u32), i32> = HashMap::new();
        last.try_reserve(points.len()).map_err(|_| out_of_memory_error::<[u32; 3]>(points.len()))?;
        last.extend(points.iter().enumerate().map(|(at, &point)| (point, nth(values, at))));
        let values = try_collect(last.values().copied())?;
        let points = try_collect(last.into_keys())?;
        let places = TablePlaces {
            row: Operand::List(try_collect(points.iter().map(|(row, _)| row.number().cast_signed()))?.into()),
            column: Operand::List(try_collect(points.iter().map(|(_, column)| column.cast_signed()))?.into()),
            count: points.len(),
            known: Some(KnownPlaces::Points(points)),
        };
        self.enqueue(&places, &Operand::List((&values).into()), Some(&values), stream)
    }

    /// Enqueues a write, and updates the mirror now or when the kernel has echoed its writes.
    fn enqueue(
        &mut self,
        places: &TablePlaces<'_>,
        value: &Operand<'_>,
        known: Option<&[i32]>,
        stream: Stream,
    ) -> Result<()> {
        let Executor::Device(launcher) = &self.executor else { return Ok(()) };
        let numbers = [places.row.numbers(), places.column.numbers(), value.numbers()];
        let Some(mirror) = self.mirror.clone() else {
            return launcher.write_points(&self.table()?, numbers, places.count, None, stream).map(drop);
        };
        let rows = || places.known.as_ref().map(KnownPlaces::rows);
        let forget = || rows().map_or_else(|| mirror.forget_all(), |rows| mirror.forget(rows));
        let noted = places.known.as_ref().zip(known).filter(|_| mirror.is_settled());
        let echo = if noted.is_none() { Some(mirror.echoes()) } else { None };
        let held =
            launcher.write_points(&self.table()?, numbers, places.count, echo, stream).inspect_err(|_| {
                // A part may have been written.
                forget();
            })?;
        match (noted, held) {
            (Some((&KnownPlaces::Columns { row, from, count }, values)), _) => {
                let values = broadcast(values, count)?;
                mirror.wrote_columns(std::iter::once((row, from, &*values)));
            }
            (Some((KnownPlaces::Points(points), values)), _) => {
                let points = points.iter().enumerate();
                mirror.wrote_points(points.map(|(at, &(row, column))| (row, column, nth(values, at))));
            }
            (None, Some(held)) => mirror.expect_echo(held, places.count),
            // The ring has no room for an echo.
            (None, None) => forget(),
        }
        match places.known {
            None => (),
            Some(KnownPlaces::Points(ref points)) => {
                for &(row, column) in points {
                    self.rows.record_written(row, column + 1);
                }
            }
            Some(KnownPlaces::Columns { row, from, count }) => self.record_written(row, from + count),
        }
        Ok(())
    }
}

/// Returns whether a place is listed more than once.
fn has_repeats(points: &[(RequestRow, u32)]) -> Result<bool> {
    let mut seen = HashSet::new();
    seen.try_reserve(points.len()).map_err(|_| out_of_memory_error::<usize>(points.len()))?;
    Ok(!points.iter().all(|point| seen.insert(point)))
}

/// Returns the value number `at`, or the only one.
fn nth(values: &[i32], at: usize) -> i32 {
    if let [only] = values { *only } else { values[at] }
}

/// Returns the values of indices, if the host knows them.
fn known(indices: &Indices<'_>) -> Result<Option<IndexVec>> {
    match indices {
        Indices::Host(values) => values.try_clone().map(Some),
        Indices::Device { tensor, version } => Ok(known_values(tensor, *version)),
    }
}
