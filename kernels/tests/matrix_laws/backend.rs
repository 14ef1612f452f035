//! Memory, views and events.

use quintet_kernels::backend::slice_mut;
use quintet_kernels::{Backend, Error, Queue, Rows, Tag};

use crate::support::{download, upload};

pub fn memory_is_counted<B: Backend>(dev: &B) {
    let meter = dev.meter();
    assert_eq!(Tag::ALL.map(|tag| meter.now(tag)), [0; 6]);
    let grad = dev.zeros::<f32>(Tag::Grad, 100).unwrap();
    let param = dev.clone().upload(Tag::Param, &[1_i32; 7]).unwrap();
    assert_eq!((meter.now(Tag::Grad), meter.now(Tag::Param)), (400, 28));
    drop(grad);
    assert_eq!((meter.now(Tag::Grad), meter.peak(Tag::Grad)), (0, 400));
    meter.reset_peak();
    assert_eq!((meter.peak(Tag::Grad), meter.peak(Tag::Param)), (0, 28));
    drop(param);
    assert_eq!(meter.now(Tag::Param), 0);
    let huge = dev.zeros::<f64>(Tag::Comm, usize::MAX / 64);
    assert!(matches!(huge, Err(Error::Memory { .. })));
    assert_eq!(meter.now(Tag::Comm), 0);
}

pub fn views_cut_and_join<B: Backend>(dev: &B) {
    let src = upload(dev, &(0..10).collect::<Vec<i32>>());
    let all = B::whole(&src);
    assert_eq!(B::len(B::slice(all, 3..7)), 4);
    assert_eq!(B::len(B::slice(all, 8..99)), 2);
    assert_eq!(B::len(B::slice(all, 50..99)), 0);
    let mut dst = dev.zeros::<i32>(Tag::Scratch, 10).unwrap();
    assert_eq!(download(dev, &dst), [0; 10]);
    {
        let (mut low, high) = B::split_mut(B::whole_mut(&mut dst), 4);
        dev.copy(B::slice(all, 6..10), B::reborrow(&mut low))
            .unwrap();
        assert_eq!(B::len(B::as_ref(&low)), 4);
        dev.copy(B::slice(all, 0..2), slice_mut::<B, i32>(high, 1..3))
            .unwrap();
    }
    assert_eq!(download(dev, &dst), [6, 7, 8, 9, 0, 0, 1, 0, 0, 0]);
    let (_, none) = B::split_mut(B::whole_mut(&mut dst), 50);
    assert_eq!(B::len(B::as_ref(&none)), 0);
}

pub fn events_happen<B: Backend>(dev: &B) {
    let x = upload(dev, &[5.0_f32; 3]);
    let mut y = dev.zeros::<f32>(Tag::Scratch, 3).unwrap();
    dev.copy(B::whole(&x), B::whole_mut(&mut y)).unwrap();
    let event = dev.record(Queue::Compute);
    dev.wait(Queue::Comm, &event);
    let back = dev.record(Queue::Comm);
    dev.wait(Queue::Compute, &back.clone());
    assert_eq!(download(dev, &y), [5.0; 3]);
}

pub fn wrong_lengths_are_refused<B: Backend>(dev: &B) {
    let x = upload(dev, &[1.0_f64; 3]);
    let mut y = upload(dev, &[2.0_f64; 4]);
    let refused = dev.copy(B::whole(&x), B::whole_mut(&mut y));
    assert!(matches!(refused, Err(Error::Len { .. })));
    let refused = dev.download(B::whole(&x), &mut [0.0; 2]);
    assert!(matches!(refused, Err(Error::Len { .. })));
    assert_eq!(download(dev, &y), [2.0; 4]);
}

pub fn rows_are_copied<B: Backend>(dev: &B) {
    let src = upload(dev, &(0..12).collect::<Vec<i32>>());
    let mut dst = dev.zeros::<i32>(Tag::Scratch, 9).unwrap();
    let mut rows = Rows {
        rows: 3,
        width: 2,
        src_step: 4,
        dst_step: 3,
    };
    let from = B::slice(B::whole(&src), 1..12);
    dev.copy_rows(&rows, from, B::whole_mut(&mut dst)).unwrap();
    assert_eq!(download(dev, &dst), [1, 2, 0, 5, 6, 0, 9, 10, 0]);
    rows.src_step = 5;
    let far = dev.copy_rows(&rows, from, B::whole_mut(&mut dst));
    assert!(matches!(
        far,
        Err(Error::Len {
            what: "src",
            expected: 12,
            got: 11,
            ..
        })
    ));
    rows.rows = usize::MAX;
    assert!(dev.copy_rows(&rows, from, B::whole_mut(&mut dst)).is_err());
    rows.rows = 0;
    let none = B::slice(from, 0..0);
    dev.copy_rows(&rows, none, B::whole_mut(&mut dst)).unwrap();
}
