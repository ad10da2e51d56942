//! The request table: ownership and contents of rows.

use std::collections::VecDeque;
use std::sync::Arc;

use kvpool::base::{DType, ErrorKind, Id, IndexVec, contiguous_strides};
use kvpool::kernels::Indices;
use kvpool::memory::{Host, Region};
use kvpool::pool::{ReqToTokenConfig, ReqToTokenPool, TableIndex};

use super::{
    Refusal, STREAM, Source, Verdict, agree, contents, dims, ensure, host, int, ints_of, places, size,
};

/// Rows as a queue, and the table as a plain array.
struct Model {
    /// The first row.
    first: usize,
    columns: usize,
    free: VecDeque<usize>,
    table: Vec<Vec<i32>>,
    dropped: usize,
}

impl Model {
    fn is_live(&self, row: usize) -> bool {
        (self.first..self.table.len()).contains(&row) && !self.free.contains(&row)
    }

    /// Frees rows, and returns the freed ones, and the first that could not be.
    fn free(&mut self, given: &[i64]) -> (Vec<usize>, Option<i64>) {
        let (mut freed, mut bad) = (Vec::new(), None);
        for &row in given {
            let live = usize::try_from(row).ok().filter(|row| self.is_live(*row) && !freed.contains(row));
            if live.is_none() {
                bad = bad.or(Some(row));
                self.dropped += 1;
            }
            freed.extend(live);
        }
        (freed, bad)
    }

    /// The row and the columns of a slice, if it is one.
    fn columns(&self, row: i64, start: i64, end: Option<i64>) -> Verdict<(usize, usize, usize)> {
        let row = self.row(row)?;
        let start = usize::try_from(start).map_err(|_| ErrorKind::Index)?;
        let end = end.map_or(Ok(self.columns), usize::try_from).map_err(|_| ErrorKind::Index)?;
        ensure(end <= self.columns, ErrorKind::Index)?;
        ensure(start <= end, ErrorKind::Argument)?;
        Ok((row, start, end))
    }

    fn row(&self, row: i64) -> Verdict<usize> {
        Ok(places(&[row], self.table.len())?[0])
    }

    /// Writes to places, or does nothing when one is outside or the number of values differs.
    fn write(&mut self, places: Verdict<Vec<(usize, usize)>>, values: &[i64]) -> Verdict {
        let values: Option<Vec<i32>> = values.iter().map(|&value| i32::try_from(value).ok()).collect();
        let values = values.ok_or(ErrorKind::Argument)?;
        let places = places?;
        ensure(values.len() == places.len() || values.len() == 1, ErrorKind::Argument)?;
        for (at, (row, column)) in places.into_iter().enumerate() {
            self.table[row][column] = values[if values.len() == 1 { 0 } else { at }];
        }
        Ok(())
    }
}

struct Rows {
    pool: ReqToTokenPool,
    model: Model,
}

pub(super) fn run(source: &mut Source<'_>) {
    let (count, columns) = (1 + source.below(9), 1 + source.below(20));
    let (padding, strict) = (source.flip(), source.rarely(3));
    let config = ReqToTokenConfig { padding_row: padding, strict, ..ReqToTokenConfig::new(count, columns) };
    let pool = ReqToTokenPool::new(&config, &host()).expect("memory");
    let first = usize::from(padding);
    let table = vec![vec![0; columns]; count + first];
    let model = Model { first, columns, free: (first..count + first).collect(), table, dropped: 0 };
    let mut rows = Rows { pool, model };
    while source.next_step() {
        rows.step(source);
        rows.check();
    }
}

impl Rows {
    fn step(&mut self, source: &mut Source<'_>) {
        match source.below(16) {
            0..=2 => {
                let count = if source.rarely(16) { usize::MAX } else { source.below(5) };
                let taken = self.pool.alloc(count, STREAM).expect("host memory");
                let expected = (count <= self.model.free.len())
                    .then(|| self.model.free.drain(..count).collect::<Vec<_>>());
                assert_eq!(
                    taken.map(|rows| rows.into_iter().map(|row| size(row.number())).collect()),
                    expected
                );
                // Writes while they had no owner are cleared.
                for row in expected.into_iter().flatten() {
                    self.model.table[row].fill(0);
                }
            }
            3..=5 => self.free(source),
            6..=8 => self.write_columns(source),
            9..=11 => self.write_points(source),
            12 => self.write_past(source),
            13 => self.build(source),
            14 => {
                let (row, length) =
                    (source.index(self.model.table.len()), source.index(self.model.columns + 1));
                let expected = self.model.columns(row, 0, Some(length));
                let view = agree(self.pool.read(row, length), &expected);
                if let (Some(view), Ok((row, _, end))) = (view, expected) {
                    assert_eq!(ints_of(&view), self.model.table[row][..end]);
                }
            }
            _ if source.rarely(4) => {
                self.pool.clear(None, STREAM).expect("host memory");
                self.model.free = (self.model.first..self.model.table.len()).collect();
                self.model.table.iter_mut().for_each(|row| row.fill(0));
            }
            _ => (),
        }
    }

    fn free(&mut self, source: &mut Source<'_>) {
        let given = source.indices(4, self.model.table.len());
        let dropped = self.model.dropped;
        let (freed, bad) = self.model.free(&given);
        let bad = bad.filter(|_| self.pool.strict());
        let expected = bad.map_or(Ok(()), |row| Err(Refusal::at(ErrorKind::IndexOwnership, row)));
        match agree(self.pool.free(&source.index_vec(&given), STREAM), &expected) {
            None => self.model.dropped = dropped,
            Some(outcome) => {
                assert_eq!(outcome.bad.dropped(), self.model.dropped - dropped);
                for &row in &freed {
                    self.model.table[row].fill(0);
                }
                self.model.free.extend(freed);
            }
        }
    }

    fn write_columns(&mut self, source: &mut Source<'_>) {
        let (row, start) = (source.index(self.model.table.len()), source.index(self.model.columns));
        let end = source.flip().then(|| source.index(self.model.columns + 1));
        let columns = self.model.columns(row, start, end);
        let places =
            columns.map(|(row, start, end)| (start..end).map(|column| (row, column)).collect::<Vec<_>>());
        let values = values(source, places.as_ref().map_or(3, Vec::len));
        let index = TableIndex::Columns { row, start, end };
        let answer = self.pool.write(index, Indices::Host(source.index_vec(&values)), STREAM);
        agree(answer, &self.model.write(places, &values));
    }

    fn write_points(&mut self, source: &mut Source<'_>) {
        let (rows, columns) =
            (source.indices(4, self.model.table.len()), source.indices(4, self.model.columns));
        let values = values(source, rows.len());
        let model = &self.model;
        let places = ensure(rows.len() == columns.len(), ErrorKind::Argument).and_then(|()| {
            let (rows, columns) = (places(&rows, model.table.len())?, places(&columns, model.columns)?);
            Ok(rows.into_iter().zip(columns).collect())
        });
        let index = TableIndex::Points {
            rows: Indices::Host(source.index_vec(&rows)),
            columns: Indices::Host(source.index_vec(&columns)),
        };
        let answer = self.pool.write(index, Indices::Host(source.index_vec(&values)), STREAM);
        agree(answer, &self.model.write(places, &values));
    }

    /// Writes to the table from outside, and marks it as modified.
    fn write_past(&mut self, source: &mut Source<'_>) {
        let row = source.index(self.model.table.len());
        let place = self.model.row(row);
        if let Ok(row) = place {
            let column = source.below(self.model.columns);
            let at = (row * self.model.columns + column) * size_of::<i32>();
            contents::write(self.pool.req_to_token().region(), at, &[77i32]);
            self.model.table[row][column] = 77;
        }
        agree(self.pool.mark_modified(&IndexVec::I64(vec![row]), None), &place);
    }

    fn build(&mut self, source: &mut Source<'_>) {
        let rows = source.indices(4, self.model.table.len());
        let mut ends = vec![source.within(0, 2)];
        for _ in 0..rows.len() {
            let last = ends[ends.len() - 1];
            ends.push(if source.rarely(8) {
                source.index(40)
            } else {
                last.saturating_add(source.within(0, 6))
            });
        }
        if source.rarely(16) {
            ends.pop();
        }
        let room = source.below(24);
        let region = Region::new(Arc::new(Host), room * size_of::<i32>()).expect("memory");
        let shape = dims(&[room]);
        let out = region.borrow(0, DType::I32, shape, contiguous_strides(&shape)).expect("inside");
        let (given, indptr) =
            (Indices::Host(source.index_vec(&rows)), Indices::Host(source.index_vec(&ends)));
        let answer = self.pool.build_kv_indices(&given, &indptr, &out, STREAM);
        let mut expected = vec![0; room];
        let parts = rows.iter().zip(ends.windows(2)).map(|(&row, ends)| {
            let part = usize::try_from(ends[0]).ok().zip(usize::try_from(ends[1]).ok());
            let (begin, end) = part.filter(|(begin, end)| begin <= end).ok_or(ErrorKind::Index)?;
            let (row, _, _) = self.model.columns(row, 0, Some(int(end - begin)))?;
            ensure(end <= room, ErrorKind::Index)?;
            Ok((row, begin..end))
        });
        let parts: Verdict<Vec<_>> = parts.collect();
        let parts = ensure(ends.len() == rows.len() + 1, ErrorKind::Argument).and(parts);
        // Any of the invalid rows and parts may be named.
        let parts = parts.map_err(|refusal| refusal.kind.into());
        agree(answer, &parts);
        for (row, part) in parts.into_iter().flatten() {
            let count = part.len();
            expected[part].copy_from_slice(&self.model.table[row][..count]);
        }
        assert_eq!(contents::read::<i32>(&region, 0, room), expected);
    }

    fn check(&self) {
        assert_eq!(self.pool.available_size(), self.model.free.len());
        self.pool.with_rows(|table| {
            assert_eq!(table.rows().broken_invariant(), None);
            assert_eq!(table.dropped_frees(), self.model.dropped);
            let free = table.rows().free_indices().expect("memory");
            assert!(free.iter().map(|row| size(row.number())).eq(self.model.free.iter().copied()));
        });
        assert_eq!(ints_of(self.pool.req_to_token()), self.model.table.concat());
    }
}

/// Values for `places` places: usually that many or one, rarely some that do not fit int32.
fn values(source: &mut Source<'_>, places: usize) -> Vec<i64> {
    let count = match source.below(8) {
        0 => 1,
        1 => source.below(5),
        _ => places,
    };
    let first = if source.rarely(16) { i64::from(i32::MAX) } else { source.within(-5, 250) };
    (0..int(count)).map(|step| first + step).collect()
}
