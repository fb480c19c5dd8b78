package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// counts is of calls: those begun, those ended, and those of them that failed; and of the messages that came.
type counts struct {
	begun, ended, failed, messages atomic.Int64
}

// load makes many calls of Generate over one channel, some at once, and counts them.
func load(ctx context.Context, c client) error {
	var counts counts
	start := time.Now()
	more := func() bool {
		if c.duration > 0 {
			return time.Since(start) < c.duration
		}
		return counts.begun.Add(1) <= c.calls
	}
	var workers sync.WaitGroup
	for range c.atOnce {
		workers.Go(func() {
			for ctx.Err() == nil && more() {
				counts.add(ctx, callOnce(ctx, c, &counts.messages))
			}
		})
	}
	workers.Wait()
	fmt.Printf("calls: %d, failed: %d, messages: %d, seconds: %.1f\n",
		counts.ended.Load(), counts.failed.Load(), counts.messages.Load(), time.Since(start).Seconds())
	if counts.failed.Load() > 0 {
		return errReported
	}
	return nil
}

// callOnce makes one call and reads it to its end.
func callOnce(ctx context.Context, c client, messages *atomic.Int64) error {
	ctx, cancel := withDeadline(ctx, c.timeout)
	defer cancel()
	stream, err := c.Generate(ctx, c.generateRequest(c.texts[0]))
	if err != nil {
		return err
	}
	for {
		if _, err := stream.Recv(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		messages.Add(1)
	}
}

// add counts a call that has ended with err. One that was cancelled counts neither way.
func (c *counts) add(ctx context.Context, err error) {
	if err != nil && ctx.Err() != nil {
		return
	}
	c.ended.Add(1)
	if err != nil {
		c.failed.Add(1)
		fmt.Fprint(os.Stderr, describe(err))
	}
}
